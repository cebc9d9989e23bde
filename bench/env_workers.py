"""Episodes a second of an environment that computes, played by one worker process and by several.

python bench/env_workers.py                  # one process and two, three times each in turn
python bench/env_workers.py --processes 1 2 4 --repeats 1

Each step of the environment takes 10 ms of processor time in pure Python; the engine is scripted. The rate is that of
the episodes between the first and the last tenth, in which all processes play.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.envs import Environment
from palestra.envs.environment import Reset, Step

STEP_SECONDS = 0.01
STEPS = 5  # of an episode
GROUPS, GROUP = 16, 16
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


def episodes_per_second(folder: Path) -> float:
    """Return the rate of a run's episodes, without the first and the last tenth of them."""
    with sqlite3.connect(folder / "run.db") as store:
        rows = store.execute("SELECT ended_at FROM episodes WHERE state = 'completed' ORDER BY ended_at").fetchall()
    ends = [row[0] for row in rows]
    tenth = len(ends) // 10
    return (len(ends) - 2 * tenth - 1) / (ends[-tenth - 1] - ends[tenth])


def measure(processes: int) -> float:
    """Train for one step with so many worker processes; return the episodes a second."""
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
            time.sleep(1.0)
            with subprocess.Popen(words, **quiet) as worker:
                assert worker.wait() == 0
            assert job.wait() == 0
        return episodes_per_second(folder / "run")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}", flush=True)
    rates: dict[int, list[float]] = {count: [] for count in arguments.processes}
    for _ in range(arguments.repeats):
        for count in arguments.processes:
            rates[count].append(measure(count))
    first = statistics.median(rates[arguments.processes[0]])
    print("| worker processes | episodes a second | steps a second | to the first row |")
    print("|---|---|---|---|")
    for count, found in rates.items():
        rate = statistics.median(found)
        spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
        print(f"| {count} | {rate:.2f}{spread} | {rate * STEPS:.1f} | {rate / first:.2f} |")


if __name__ == "__main__":
    main()
