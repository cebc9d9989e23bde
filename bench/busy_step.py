"""Times GRPO steps on a quiet machine and beside one process that keeps a core busy, in turns.

    python bench/busy_step.py [--rounds 3] [--steps 3]

A laptop is never quiet. Threads of OpenMP that wait actively for one another then lose what they win on a quiet one:
the one that is waited for needs the core on which another one spins. So all is timed twice, with the limit on spinning
that Palestra sets (palestra/models/openmp.py), and with what GNU's OpenMP does by itself. The step is that of
bench/step_palestra.py; each run is a process of its own, and its first step is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from processes import HERE, SPINNING, run_json

from palestra.models.openmp import SPIN_VARIABLE

SETTINGS = {"Palestra's limit": SPINNING, "OpenMP's own": {SPIN_VARIABLE: "300000"}}  # the default of libgomp
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


def measure(threads: int, rounds: int, steps: int) -> dict[tuple[str, bool], list[dict[str, float]]]:
    """Return the seconds of all steps by (setting, whether a process was busy)."""
    found: dict[tuple[str, bool], list[dict[str, float]]] = {}
    command = (sys.executable, HERE / "step_palestra.py", "--threads", threads, "--steps", steps)
    for _ in range(rounds):
        for name, environment in SETTINGS.items():
            for busy in (False, True):
                with neighbour(busy):
                    found.setdefault((name, busy), []).extend(run_json(command, environment)["steps"])
    return found


def main() -> None:
    """Read the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a process; the first is a warm-up")
    wanted = parser.parse_args()
    found = measure(wanted.threads, wanted.rounds, wanted.steps)
    print("| waiting | neighbour | generate s | forward + backward s | step s | beside quiet |")
    print("|---|---|--:|--:|--:|--:|")
    for name in SETTINGS:
        quiet = statistics.median(step["total"] for step in found[name, False])
        for busy in (False, True):
            medians = [statistics.median(step[piece] for step in found[name, busy]) for piece in PIECES]
            cells = " | ".join(f"{seconds:.2f}" for seconds in medians)
            print(f"| {name} | {'one busy process' if busy else 'none'} | {cells} | {medians[-1] / quiet:.2f} |")


if __name__ == "__main__":
    main()
