"""Times GRPO steps on a quiet machine and beside one process that keeps a core busy, in turns.

    python bench/busy_step.py [--rounds 3] [--steps 4]

A laptop is never quiet. Threads that compute a product together wait for the slowest of them, so that two threads
beside one busy process take longer than one. All is timed with as many threads as other processes leave, which is
Palestra's default (palestra/models/shared_cores.py), and with one for each core. The step is that of
bench/step_palestra.py; each run is a process of its own, and its first step is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from processes import HERE, run_json

SETTINGS = {"what others leave": 0, "one a core": os.cpu_count() or 1}
PIECES = ("generate", "forward_backward", "total")
BUSY = "while True: pass"


@contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """Keep a process busy beside the block, or none."""
    process = subprocess.Popen([sys.executable, "-c", BUSY]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def measure(rounds: int, steps: int) -> dict[tuple[str, bool], list[dict[str, float]]]:
    """Return the seconds of all steps by (setting, whether a process was busy)."""
    found: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for name, threads in SETTINGS.items():
            command = (sys.executable, HERE / "step_palestra.py", "--threads", threads, "--steps", steps)
            for busy in (False, True):
                with neighbour(busy):
                    found.setdefault((name, busy), []).extend(run_json(command)["steps"])
    return found


def main() -> None:
    """Read the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a process; the first is a warm-up")
    wanted = parser.parse_args()
    found = measure(wanted.rounds, wanted.steps)
    print("| threads | neighbour | generate s | forward + backward s | step s | beside quiet |")
    print("|---|---|--:|--:|--:|--:|")
    for name in SETTINGS:
        quiet = statistics.median(step["total"] for step in found[name, False])
        for busy in (False, True):
            medians = [statistics.median(step[piece] for step in found[name, busy]) for piece in PIECES]
            cells = " | ".join(f"{seconds:.2f}" for seconds in medians)
            print(f"| {name} | {'one busy process' if busy else 'none'} | {cells} | {medians[-1] / quiet:.2f} |")


if __name__ == "__main__":
    main()
