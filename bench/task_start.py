"""What the start of a job costs by the way in which its tasks come: CPU, memory and disk, until its first episode.

    python bench/task_start.py [--tasks 1000000] [--bytes 1000000000] [--folder FOLDER] [WAY …]

Each run is a process of its own, with the scripted engine and a reward function: `--tasks` tasks of 70 bytes, or, in
large ways, tasks of 10,000 bytes, `--bytes` in all. Time, CPU and memory are what the run takes more than one with a
single task; memory is the highest, without the user's own list. The log is the longest write-ahead log that was seen,
the disk the files of the run at its first episode. `--folder` needs three times the bytes; what is made is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from palestra import JobConfig, train

LARGE = 10_000  # bytes of a task
SECONDS = 0.01  # between two looks at the write-ahead log
ONE, COLUMNS = "one task", f"{'s':>7}{'CPU s':>8}{'MiB':>7}{'log':>6}{'disk':>7}"


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
    return ({"id": f"t{number}", "prompt": "what?", "answer": "x" * LARGE} for number in range(size // LARGE))


# From the folder of the files, the number of small tasks, and the bytes of large ones: the arguments of `train`.
WAYS: dict[str, Callable[[Path, int, int], dict[str, Any]]] = {
    ONE: lambda folder, tasks, size: {"tasks": list(small(1))},
    "file": lambda folder, tasks, size: {"files": {"train": folder / "small.jsonl"}},
    "path": lambda folder, tasks, size: {"tasks": folder / "small.jsonl"},
    "list": lambda folder, tasks, size: {"tasks": list(small(tasks))},
    "iterator": lambda folder, tasks, size: {"tasks": small(tasks)},
    "function": lambda folder, tasks, size: {"tasks": lambda: small(tasks)},
    "stream": lambda folder, tasks, size: {"tasks": Stream(lambda: small(tasks))},
    "large file": lambda folder, tasks, size: {"files": {"train": folder / "large.jsonl"}},
    "large iterator": lambda folder, tasks, size: {"tasks": large(size)},
    "large held-out file": lambda folder, tasks, size: {
        "files": {"train": folder / "one.jsonl", "validation": folder / "large.jsonl"}
    },
}


def main() -> None:
    """Make the files, start and resume a run in each way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", metavar="WAY", nargs="*", default=[way for way in WAYS if way != ONE])
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--folder", type=Path, help="on the disk to use; without it, the system's temporary folder")
    parser.add_argument("--child", choices=("start", "resume"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        brought = WAYS[arguments.ways[0]](arguments.folder, arguments.tasks, arguments.bytes)
        play(arguments.folder / arguments.ways[0], brought, resume=arguments.child == "resume")
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        arguments.folder = folder = Path(temporary)
        write(folder / "one.jsonl", small(1))
        print(f"{'':20}{'start':>35}{'resume':>35}\n{'tasks by':20}{COLUMNS}{COLUMNS}")
        base = shown(ONE, arguments, None)
        for way in arguments.ways:
            file = folder / ("large.jsonl" if way.startswith("large") else "small.jsonl")
            if way.endswith(("file", "path")):
                write(file, large(arguments.bytes) if file.name == "large.jsonl" else small(arguments.tasks))
            shown(way, arguments, base)
            file.unlink(missing_ok=True)


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write a file of tasks."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def shown(way: str, arguments: argparse.Namespace, base: list[list[float]] | None) -> list[list[float]]:
    """Start and resume a run, print a row, and return the figures of both."""
    found = []
    for child in ("start", "resume"):
        words = [sys.executable, __file__, way, "--child", child, "--folder", str(arguments.folder)]
        words += ["--tasks", str(arguments.tasks), "--bytes", str(arguments.bytes)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        found.append([float(each) for each in json.loads(done.stdout)])
    for path in (arguments.folder / way).glob("run.db*"):
        path.unlink()
    row = f"{way:20}"
    for figures, less in zip(found, base or [[0.0] * 3] * 2, strict=True):
        seconds, cpu, memory = (figure - one for figure, one in zip(figures[:3], less, strict=False))
        row += f"{seconds:7.1f}{cpu:8.1f}{memory:7.0f}{figures[3]:6.0f}{figures[4]:7.0f}"
    print(row, flush=True)
    return found


def play(folder: Path, brought: dict[str, Any], resume: bool) -> None:
    """Train until the first episode, print seconds, CPU seconds, and MiB of memory, log and disk, and end."""
    job = JobConfig.model_validate(
        {
            "steps": 10**7,  # an iterator is read for as many groups
            "run_dir": folder,
            "engine": {"kind": "fake"},
            "evaluation": {"every_steps": 10**6},
            "tasks": brought.pop("files", {}),
            "rollout": {"groups_per_step": 1, "group_size": 2},
        }
    )
    before, began, cpu, logs = memory_of("VmRSS"), time.perf_counter(), time.process_time(), [0]

    def look() -> None:
        while True:
            with suppress(OSError):
                logs[0] = max(logs[0], (folder / "run.db-wal").stat().st_size)
            time.sleep(SECONDS)

    def reward(task: dict[str, Any], answer: str) -> float:
        figures = [time.perf_counter() - began, time.process_time() - cpu]
        disk = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        sizes = [memory_of("VmHWM") - before, logs[0], disk]
        print(json.dumps(figures + [size / 2**20 for size in sizes]), flush=True)
        os._exit(0)  # the run can be resumed

    threading.Thread(target=look, daemon=True).start()
    train(reward=reward, config=job, resume=resume, quiet=True, concurrency=1, **brought)


def memory_of(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
