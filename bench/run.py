"""The benchmark: prints tables, writes bench/results.json.

python bench/run.py                        everything (about half an hour)
python bench/run.py --only data-plane      one part, or several with commas (step,algorithms,policies,micro-batches,
                                           engine,logprob-gap,merging,rollouts,placement,service,data-plane,
                                           long-requests,episodes)
python bench/run.py --quick                the same with fewer and shorter runs, for looking at a change
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import algorithm_steps
import data_plane
import engine
import episodes
import logprob_gap
import long_requests
import merging
import micro_batches
import placement
import policy_steps
import rollouts
import service
import step
from figures import Part, show, write
from load_runs import Runs
from machine import observed, remark
from processes import BenchError
from rich.console import Console

FULL, QUICK = Runs(repeats=3, seconds=5.0), Runs(repeats=1, seconds=2.0)
PARTS: dict[str, Callable[[Part, argparse.Namespace], None]] = {
    "step": lambda part, arguments: step.run(part, arguments.threads, arguments.quick),
    "algorithms": lambda part, arguments: algorithm_steps.run(part, arguments.threads, arguments.quick),
    "policies": lambda part, arguments: policy_steps.run(part, arguments.threads, arguments.quick),
    "micro-batches": lambda part, arguments: micro_batches.run(part, arguments.threads, arguments.quick),
    "engine": lambda part, arguments: engine.run(part, arguments.threads, arguments.quick),
    "logprob-gap": lambda part, arguments: logprob_gap.run(part, arguments.threads, arguments.quick),
    "merging": lambda part, arguments: merging.run(part, arguments.quick),
    "rollouts": lambda part, arguments: rollouts.run(part, arguments.quick),
    "placement": lambda part, arguments: placement.run(part, arguments.quick),
    "service": lambda part, arguments: service.run(part, arguments.quick),
    "data-plane": lambda part, arguments: data_plane.run(part, QUICK if arguments.quick else FULL),
    "long-requests": lambda part, arguments: long_requests.run(part, arguments.quick),
    "episodes": lambda part, arguments: episodes.run(part, QUICK if arguments.quick else FULL),
}


def parts_named(text: str) -> list[str]:
    """The parts that a comma-separated list names."""
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is no part; there are {', '.join(PARTS)}")
    return names


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=parts_named, default=list(PARTS), metavar="PARTS")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="for arithmetic; default: all cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    return parser.parse_args()


def main() -> int:
    """Run the parts one after another."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    command = " ".join(["python", *sys.argv])
    for name in arguments.only:
        part = Part(name=name)
        console.print(f"\n[bold]{name}[/] …")
        try:
            with observed(part.machine):
                PARTS[name](part, arguments)
        except BenchError as error:
            console.print(f"{name} failed: {error}", markup=False)
            return 1
        part.machine["command"] = command
        part.notes.append(remark(part.machine))
        show(part, console)
        write([part], arguments.out)
    console.print(f"\nwritten to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
