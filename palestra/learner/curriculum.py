"""`SuccessBand`: draws tasks that the policy solves sometimes, and lets none wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np

from palestra.config import CurriculumConfig
from palestra.learner.samplers import History, PlayedGroup, TaskPool, TaskSampler


class SuccessBand(TaskSampler):
    """Thompson sampling of tasks whose share of solved episodes is near a target.

    What is known of a task is a Beta distribution of that share, which begins as (1, 1). A group of n episodes, of
    which s are solved, makes (a, b) to

        a <- (1 - forget) a + forget + s,    b <- (1 - forget) b + forget + n - s

    Each step draws a share for every task from its distribution, and takes the tasks whose shares are nearest to
    `target`. One group of every 1 / `explore` plays the task that has waited longest instead, whatever is known of it.
    So each of N tasks comes back within N / `explore` groups, and so do those that were too hard.
    """

    def __init__(self, config: CurriculumConfig, pool: TaskPool, seed: int) -> None:
        """Keep the settings; see `TaskSampler`."""
        super().__init__(pool, seed)
        self._config = config
        self._known: tuple[PlayedGroup, ...] = ()  # which the next two are made of
        self._rates = np.ones((2, len(pool)))  # a and b of each task
        self._last = np.full(len(pool), -1)  # number of each task's last group; -1: none

    def tasks(self, step: int, history: History) -> Iterator[int]:
        """Yield each task once, in turn near the target and from those that have waited longest, and then again."""
        self._learn(history.results)
        draw = np.random.Generator(np.random.Philox(key=_key(self.seed, step)))
        distance, last = np.abs(draw.beta(*self._rates) - self._config.target), self._last.copy()
        number = len(history.results)
        for position in history.underway:  # these come again after all others
            distance[position] += 1.0
            last[position], number = number, number + 1
        near = np.argsort(distance, kind="stable").tolist()
        waiting = np.lexsort((draw.permutation(len(self.pool)), last)).tolist()
        while True:
            yield from self._merged(near, waiting, number)
            number += len(self.pool)

    def _merged(self, near: list[int], waiting: list[int], number: int) -> Iterator[int]:
        """Yield each task once, from two orders of them; `number` of the first group decides which is next."""
        orders, drawn, explore = (iter(near), iter(waiting)), set[int](), self._config.explore
        for each in range(number, number + len(near)):
            explores = int((each + 1) * explore) > int(each * explore)
            position = next(one for one in orders[explores] if one not in drawn)
            drawn.add(position)
            yield position

    def _learn(self, results: tuple[PlayedGroup, ...]) -> None:
        """Bring what is known of the tasks to these results."""
        if results[: len(self._known)] != self._known:
            self._known = ()
            self._rates[:], self._last[:] = 1.0, -1
        keep = 1.0 - self._config.forget
        for number, group in enumerate(results[len(self._known) :], len(self._known)):
            self._last[group.position] = number
            if group.rewards:
                solved = sum(reward >= self._config.solved for reward in group.rewards)
                counts = np.array([solved, len(group.rewards) - solved])
                self._rates[:, group.position] = keep * self._rates[:, group.position] + (1.0 - keep) + counts
        self._known = results


def _key(seed: int, step: int) -> int:
    """Return the key of a step's generator, of 128 bits."""
    return int.from_bytes(sha256(f"{seed}/{step}".encode()).digest()[:16])
