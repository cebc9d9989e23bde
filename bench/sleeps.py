"""What `rollouts` has played: steps that sleep, lognormal, and the least wall time that their schedule takes.

Standard library only: the peers' environments import it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

STEPS = 5  # an episode
SIGMA = 1.0
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Episodes of `STEPS` steps, of which `slots` are played at a time."""

    episodes: int
    slots: int
    mean_seconds: float  # of a step

    def sleeps(self) -> list[list[float]]:
        """[episodes][STEPS] seconds, the same for all contestants."""
        draw = random.Random(SEED)
        mu = math.log(self.mean_seconds) - SIGMA**2 / 2
        return [[draw.lognormvariate(mu, SIGMA) for _ in range(STEPS)] for _ in range(self.episodes)]

    def ideal_seconds(self) -> float:
        """Wall time when episodes begin in order, each on the first free slot, and nothing but sleeping takes time."""
        free = [0.0] * self.slots
        for episode in self.sleeps():
            heapq.heapreplace(free, free[0] + sum(episode))
        return max(free)

    def one_core_seconds(self, step_seconds: float) -> float:
        """Wall time of the same schedule where each step, before it sleeps, also has so much of one core for itself.

        First come, first served: what a single event loop can do at best.
        """
        table, free_at, end = self.sleeps(), 0.0, 0.0
        waiting = [(0.0, number, 0) for number in range(min(self.slots, self.episodes))]  # since, episode, step
        following = len(waiting)
        while waiting:
            since, number, step = heapq.heappop(waiting)
            if step < STEPS:
                free_at = max(free_at, since) + step_seconds
                heapq.heappush(waiting, (free_at + table[number][step], number, step + 1))
                continue
            end = max(end, since)
            if following < self.episodes:
                heapq.heappush(waiting, (since, following, 0))
                following += 1
        return end


def workload_of(
    description: str | None, more: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> tuple[Workload, argparse.Namespace]:
    """The command line of a runner; `more` adds what is its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--mean-ms", type=float, default=50.0)
    more(parser)
    arguments = parser.parse_args()
    work = Workload(episodes=arguments.episodes, slots=arguments.slots, mean_seconds=arguments.mean_ms / 1e3)
    return work, arguments


class Meter:
    """Wall and CPU seconds between `with` and its end, children that were waited for included."""

    def __enter__(self) -> Meter:
        self._cpu, self._begin = _cpu_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_seconds = time.perf_counter() - self._begin
        self.cpu_seconds = _cpu_seconds() - self._cpu

    def tell(self, work: Workload, done: int) -> None:
        """Print the result: one JSON line. All episodes have to be `done`."""
        if done != work.episodes:
            raise SystemExit(f"{done} of {work.episodes} episodes were played")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"wall": self.wall_seconds, "cpu": self.cpu_seconds, "peak_rss_mib": peak}))


def _cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in both)
