"""Episodes a second of an environment that computes, played by one worker process and by several.

python bench/env_workers.py                  # one process and two, three times each in turn
python bench/env_workers.py --processes 1 2 4 --repeats 1

Each step of the environment takes 10 ms of processor time in pure Python; the engine is scripted. The rate is that of
the episodes between the first and the last tenth, in which all processes play. The processor time of a step, of the
workers and of the job's own process, hardly depends on what else runs on the machine: where it does, the rates do not
say what the machine can do, and these do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from palestra.envs import Environment
from palestra.envs.environment import Reset, Step

STEP_SECONDS = 0.01
STEPS = 5  # of an episode
GROUPS, GROUP = 8, 16
KEY = "bench-key"
PALESTRA = Path(sys.executable).with_name("palestra")


class Busy(Environment):
    """Computes for 10 ms a step, of which no other thread of the process can use any."""

    def reset(self, task: Mapping[str, Any]) -> Reset:
        """Begin an episode."""
        self._left = STEPS
        return "Go.", {}

    def step(self, action: str) -> Step:
        """Compute."""
        end = time.thread_time() + STEP_SECONDS
        while time.thread_time() < end:
            pass
        self._left -= 1
        return "Go on.", float(len(action)), self._left == 0, False, {}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: episodes a second, and the processor time of a step in milliseconds."""

    rate: float
    worker_ms: float
    job_ms: float


class Meter:
    """Reads every tenth of a second how much processor time two processes have used, each with its children."""

    def __init__(self, *roots: int) -> None:
        self._roots, self._over = [psutil.Process(root) for root in roots], threading.Event()
        self._read: list[tuple[float, list[float]]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the readings."""
        self._over.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> list[float]:
        """Return the seconds of each process between the readings next to two times, in Unix seconds."""
        first, last = (min(self._read, key=lambda one: abs(one[0] - at))[1] for at in (begin, end))
        return [after - before for before, after in zip(first, last, strict=True)]

    def _run(self) -> None:
        while not self._over.wait(0.1):
            with contextlib.suppress(psutil.Error):  # one has ended
                self._read.append((time.time(), [_used(root) for root in self._roots]))


def _used(root: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children()))


def result(folder: Path, meter: Meter) -> Measured:
    """Return what a run has shown, without the first and the last tenth of its episodes."""
    with sqlite3.connect(folder / "run.db") as store:
        rows = store.execute("SELECT ended_at FROM episodes WHERE state = 'completed' ORDER BY ended_at").fetchall()
    ends = [row[0] for row in rows]
    tenth = len(ends) // 10
    begin, end, episodes = ends[tenth], ends[-tenth - 1], len(ends) - 2 * tenth - 1
    job, worker = meter.between(begin, end)
    per_step = 1e3 / (episodes * STEPS)
    return Measured(episodes / (end - begin), worker * per_step, job * per_step)


def measure(processes: int) -> Measured:
    """Train for one step with so many worker processes."""
    variables = os.environ | {"PALESTRA_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        folder = Path(place)
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(GROUPS)))
        (folder / "job.toml").write_text(
            f'steps = 1\nrun_dir = "{folder / "run"}"\n[engine]\nkind = "fake"\nreply_tokens = 8\n'
            f'[tasks]\ntrain = "{tasks}"\n[rollout]\ngroup_size = {GROUP}\ngroups_per_step = {GROUPS}\n'
            f"[server]\nport = {port}\n"
        )
        quiet = {"env": variables, "stdout": subprocess.DEVNULL}
        url = f"http://127.0.0.1:{port}"
        words = [PALESTRA, "worker", f"{__file__}:Busy", "--url", url]
        words += ["--processes", str(processes), "--concurrency", "4"]
        with subprocess.Popen([PALESTRA, "run", folder / "job.toml"], **quiet) as job:
            _wait_for(port)
            with subprocess.Popen(words, **quiet) as worker:
                meter = Meter(job.pid, worker.pid)
                assert worker.wait() == 0
            assert job.wait() == 0
        meter.stop()
        return result(folder / "run", meter)


def _wait_for(port: int) -> None:
    """Return when something listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}", flush=True)
    runs: dict[int, list[Measured]] = {count: [] for count in arguments.processes}
    for _ in range(arguments.repeats):
        for count in arguments.processes:
            runs[count].append(measure(count))
    rates = {count: [one.rate for one in found] for count, found in runs.items()}
    first = statistics.median(rates[arguments.processes[0]])
    print("| worker processes | episodes a second | to the first row | processor ms of a step: workers, job |")
    print("|---|---|---|---|")
    for count, found in runs.items():
        rate = statistics.median(rates[count])
        spread = f" ({min(rates[count]):.2f} to {max(rates[count]):.2f})" if len(found) > 1 else ""
        worker, job = (statistics.median(getattr(one, name) for one in found) for name in ("worker_ms", "job_ms"))
        print(f"| {count} | {rate:.2f}{spread} | {rate / first:.2f} | {worker:.2f}, {job:.2f} |")
    print(f"load average after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
