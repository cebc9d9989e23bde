"""What the start of a job costs by the way in which its tasks come: CPU, memory and disk, of a run of one step.

    python bench/task_start.py [--tasks 1000000] [--bytes 1000000000] [--folder FOLDER] [WAY …]

Each run is a process of its own, with the scripted engine and a reward function: `small` is `--tasks` tasks of 70 bytes,
`large` are tasks of 10,000 bytes, `--bytes` in all. CPU and memory are what a run takes more than the same run of one
task; memory is the highest, without the user's own list. The log is the longest write-ahead log that was seen. The
folder needs three times the bytes; the files that are made there are removed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from palestra import JobConfig, train
from palestra.config import TasksConfig

LARGE = 10_000  # bytes of a task
SECONDS = 0.01  # between two looks at the write-ahead log


class Stream:
    """Tasks without a length that can be read several times, as a streaming data set of `datasets`."""

    def __init__(self, make: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._make()


def small(count: int) -> Iterator[dict[str, Any]]:
    """Yield tasks of about 70 bytes."""
    return ({"id": f"t{number}", "prompt": f"what is {number} and {number}? " + "x" * 15} for number in range(count))


def large(size: int) -> Iterator[dict[str, Any]]:
    """Yield tasks of about LARGE bytes, `size` bytes in all."""
    return ({"id": f"t{number}", "prompt": f"what is {number}? " + "x" * LARGE} for number in range(size // LARGE))


WAYS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "file": lambda small_file, _: {"config": TasksConfig(train=small_file)},
    "large file": lambda _, large_file: {"config": TasksConfig(train=large_file)},
    "validation file": lambda one, large_file: {"config": TasksConfig(train=one, validation=large_file)},
}


def main() -> None:
    """Make the files, run each way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=list(GIVEN))
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        play(arguments.ways[0], arguments.folder, arguments.tasks, arguments.bytes, arguments.resume)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        write(folder / "one.jsonl", small(1))
        base = {resume: measured("one task", folder, arguments, resume) for resume in (False, True)}
        print(f"{'':18}{'start':>42}{'resume':>36}\n{'tasks by':18}" + f"{'s':>7}{'CPU s':>8}{'MiB':>9}{'log MiB':>9}{'disk':>9}" * 2)
        print(f"{'one task':18}" + "".join(shown(base[resume], None) for resume in (False, True)), flush=True)
        for way in arguments.ways:
            if way == "file" or "path" in way:
                write(folder / "small.jsonl", small(arguments.tasks))
            if "large" in way and "file" in way:
                write(folder / "large.jsonl", large(arguments.bytes))
            rows = (shown(measured(way, folder, arguments, resume), base[resume]) for resume in (False, True))
            print(f"{way:18}" + "".join(rows), flush=True)
            for name in ("small.jsonl", "large.jsonl"):
                (folder / name).unlink(missing_ok=True)


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write a file of tasks."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def given(way: str, folder: Path, tasks: int, size: int) -> dict[str, Any]:
    """Return the arguments of `train` that bring the tasks."""
    return GIVEN[way](folder, tasks, size)


GIVEN: dict[str, Callable[[Path, int, int], dict[str, Any]]] = {
    "file": lambda folder, tasks, size: {"config": TasksConfig(train=folder / "small.jsonl")},
    "path": lambda folder, tasks, size: {"tasks": folder / "small.jsonl"},
    "list": lambda folder, tasks, size: {"tasks": list(small(tasks))},
    "iterator": lambda folder, tasks, size: {"tasks": small(tasks)},
    "function": lambda folder, tasks, size: {"tasks": lambda: small(tasks)},
    "stream": lambda folder, tasks, size: {"tasks": Stream(lambda: small(tasks))},
    "large file": lambda folder, tasks, size: {"config": TasksConfig(train=folder / "large.jsonl")},
    "large iterator": lambda folder, tasks, size: {"tasks": large(size)},
    "large held-out file": lambda folder, tasks, size: {
        "config": TasksConfig(train=folder / "one.jsonl", validation=folder / "large.jsonl")
    },
}


def play(way: str, folder: Path, tasks: int, size: int, resume: bool) -> None:
    """Train for a step, and print CPU and memory."""
    brought = {"tasks": small(1)} if way == "one task" else given(way, folder, tasks, size)
    job = {
        "name": "start",
        "steps": 10**7,
        "run_dir": folder / "run",
        "engine": {"kind": "fake"},
        "evaluation": {"every_steps": 10**6, "max_tasks": 1},
        "tasks": brought.pop("config", {}),
        "rollout": {"groups_per_step": 1, "group_size": 2},
    }
    before, began, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()

    stop = threading.Event()
    logs = [0]

    def look() -> None:
        while not stop.wait(SECONDS):
            logs.append(max(logs.pop(), *[path.stat().st_size for path in (folder / "run").glob("run.db-wal")], 0))

    threading.Thread(target=look, daemon=True).start()
    times = []

    def reward(task: dict[str, Any], answer: str) -> float:
        times.append((time.perf_counter() - began, time.process_time() - cpu, memory("VmHWM") - before))
        import os
        disk = sum(path.stat().st_size for path in (folder / "run").iterdir() if path.is_file())
        print(json.dumps([*times[0], logs[0], disk]), flush=True)
        os._exit(0)

    train(reward=reward, config=JobConfig.model_validate(job), resume=resume, quiet=True, concurrency=1, **brought)


def memory(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measured(way: str, folder: Path, arguments: argparse.Namespace, resume: bool) -> list[float]:
    """Run a process, and return what it printed."""
    words = [sys.executable, __file__, way, "--child", "--folder", str(folder), *(["--resume"] if resume else [])]
    words += ["--tasks", str(arguments.tasks), "--bytes", str(arguments.bytes)]
    import shutil
    if not resume:
        shutil.rmtree(folder / "run", ignore_errors=True)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        return [float("nan")] * 5
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def shown(found: list[float], base: list[float] | None) -> str:
    """Return a row's part of the table."""
    seconds, cpu, peak, log, disk = found
    if base is not None:
        cpu, peak, seconds = cpu - base[1], peak - base[2], seconds - base[0]
    return f"{seconds:7.1f}{cpu:8.1f}{peak / 2**20:9.0f}{log / 2**20:9.0f}{disk / 2**20:9.0f}"


if __name__ == "__main__":
    main()
