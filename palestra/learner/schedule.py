"""The task of each group and the learning rate of each step, as functions of the job's configuration alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from palestra.config import OptimizerConfig
from palestra.types.records import Task


class TaskOrder:
    """All tasks in a new random order every epoch.

    The order depends on the seed alone, so that a resumed run gives each group the same task.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._epoch = -1
        self._order: list[int] = []

    def task(self, group_index: int) -> Task:
        """Return the task of the group with this index."""
        epoch, place = divmod(group_index, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._tasks)))
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
        return self._tasks[self._order[place]]


def learning_rate(config: OptimizerConfig, step: int, steps: int, sampled_share: float | None = None) -> float:
    """Return the learning rate of a step.

    After warm-up the rate is that of transformers' `get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup`: zero would come one step after the last, so that every step trains. During
    warm-up the rate is one step ahead of theirs, whose first step has a rate of 0 and would waste the episodes that
    were played for it.

    Args:
        config: peak, schedule and warm-up.
        step: number of the step, from 1.
        steps: number of steps of the job.
        sampled_share: share of the job's token budget that was sampled before the step, by which the rate falls in a
            job that has one; None: it falls by steps.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    if sampled_share is None:
        done = (step - 1 - config.warmup_steps) / max(1, steps - config.warmup_steps)
    else:
        done = min(sampled_share, 1.0)
    share = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.learning_rate * share
