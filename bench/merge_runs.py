"""What all runners of `merging` share: the clock, its limit, the check of the rows, and the JSON line of each case.

Standard library only: the peers' environments import it, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType

from conversations import CASES, SCALING, Ideal, Row, Turn, digest, ideal

ALL = CASES | SCALING


class TimeLimit(BaseException):
    """A run has used up its seconds. No `except Exception` of what is measured stops it."""


class Stopwatch:
    """Adds up the seconds of its `with` blocks, and raises `TimeLimit` inside the block that has no more of them."""

    def __init__(self, limit_seconds: float) -> None:
        self.seconds = 0.0
        self._limit = limit_seconds
        self._begin = 0.0
        signal.signal(signal.SIGALRM, self._stop)

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(self._limit - self.seconds, 1e-3))
        self._begin = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds += time.perf_counter() - self._begin
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        raise TimeLimit


MEMORY_SHARE = 0.8  # of the machine's: what a runner may take

Merge = Callable[[Sequence[Turn], Stopwatch], list[Row]]  # times what merges, not what makes its input


def main(ways: Mapping[str, Merge]) -> None:
    """Measure each way on each case; a JSON line for each on stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=9, help="of each case")
    parser.add_argument("--case-seconds", type=float, default=20.0, help="after which no more of its runs are begun")
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="after which a run is stopped")
    parser.add_argument("--cases", nargs="+", choices=list(ALL), default=list(ALL), metavar="CASE")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_gib() * 2**30),) * 2)
    for case in arguments.cases:
        turns = ALL[case]()
        best = ideal(turns)
        for way, merge in ways.items():
            result = measure(merge, turns, best, arguments)
            print(json.dumps({"case": case, "way": way, **result}), flush=True)


def measure(merge: Merge, turns: Sequence[Turn], best: Ideal, arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds of the runs, what the rows of the last were, and what stopped a run (None: nothing)."""
    seconds: list[float] = []
    stopped: str | None = None
    rows: list[Row] = []
    begin = time.monotonic()
    while not seconds or (len(seconds) < arguments.runs and time.monotonic() - begin < arguments.case_seconds):
        gc.collect()
        watch = Stopwatch(arguments.limit_seconds)
        try:
            rows = merge(turns, watch)
        except TimeLimit:
            stopped = f"after {arguments.limit_seconds:g} s"
            break
        except MemoryError:
            stopped = f"at {memory_gib():.0f} GiB"
            break
        seconds.append(watch.seconds)
    return {
        "seconds": seconds,
        "stopped": stopped,
        "rows": len(rows),
        "row_tokens": sum(len(ids) for ids, _ in rows),
        "trained": sum(int(sum(sampled)) for _, sampled in rows),
        "exact": digest(rows) == best.digest,
        "ideal": {"rows": best.rows, "row_tokens": best.row_tokens, "trained": best.trained, "distinct": best.distinct},
    }


def memory_gib() -> float:
    """What a runner may take."""
    return MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
