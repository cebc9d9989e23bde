"""The learning rate of each step, and what a job's budget of tokens says of its end and its evaluations."""

from __future__ import annotations

import math

from palestra.config import JobConfig, OptimizerConfig
from palestra.store import Groups, RunLog


def learning_rate(config: OptimizerConfig, step: int, steps: int, sampled_share: float | None = None) -> float:
    """Return the learning rate of a step.

    After warm-up the rate is that of transformers' `get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup`: it would be zero one step after the last, so that every step trains. During
    warm-up the rate is one step ahead of theirs, whose first rate of 0 would waste a step's episodes. Steps count from
    1. `sampled_share` is the fraction of the job's token budget sampled before the step, which then determines the
    decay.
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


SAMPLED = "rollout/sampled_tokens"


class TrainingBudget:
    """Counts the sampled tokens of a job, step by step.

    Counts come from the store, so that a resumed job ends with the same step as an uninterrupted one.

    Attributes:
        sampled: tokens sampled by the trained policies in the completed training episodes of all counted steps,
            including replaced groups.
    """

    def __init__(self, config: JobConfig, groups: Groups, log: RunLog) -> None:
        """Begin without counted steps."""
        self._config, self._groups, self._log = config, groups, log
        self.sampled = 0
        self._before = 0  # tokens of the steps before the newest that was counted

    async def restore(self, step: int) -> None:
        """Count all steps of a resumed job. `step` is the newest trained one; 0: none."""
        trained, known = self._config.trained_policies, await self._log.metrics_of(step - 1)
        if SAMPLED in known:  # the tokens of all steps before
            self._before = int(known[SAMPLED])
        else:
            self._before = await self._groups.sampled_tokens(range(1, step), trained)
        self.sampled = self._before + await self._groups.sampled_tokens(range(step, step + 1), trained)

    async def count(self, step: int) -> None:
        """Add the tokens of a gathered step."""
        trained = self._config.trained_policies
        self._before = self.sampled
        self.sampled += await self._groups.sampled_tokens(range(step, step + 1), trained)

    def is_over(self, step: int) -> bool:
        """Return whether training ends with this step, the newest counted one."""
        budget = self._config.token_budget
        return step >= self._config.steps or (budget is not None and self.sampled >= budget)

    def learning_rate(self, optimizer: OptimizerConfig, step: int) -> float:
        """Return the learning rate of the newest counted step, which decays by tokens if there is a budget. Steps count
        from 1.
        """
        budget = self._config.token_budget
        return learning_rate(optimizer, step, self._config.steps, None if budget is None else self._before / budget)

    def evaluations_after(self, step: int) -> int:
        """Estimate the number of evaluations after this step, the newest finished one."""
        config, budget, steps = self._config.evaluation, self._config.token_budget, self._config.steps
        if self.is_over(step) or not (config.every_steps or config.every_tokens):
            return 0
        if config.every_tokens is not None:
            rate = self.sampled / step if step else 0.0
            rest = rate * (steps - step) if budget is None else budget - self.sampled
            return int(rest // config.every_tokens) + 1
        if budget is not None and self.sampled:
            steps = min(steps, round(step * budget / self.sampled))
        return max(steps // config.every_steps - step // config.every_steps, 0) + bool(steps % config.every_steps)

    def evaluation_is_due(self, step: int) -> bool:
        """Return whether to evaluate the policies after this step, the newest counted one."""
        config = self._config.evaluation
        if not config.every_steps and config.every_tokens is None:
            return False
        if step == 0 or self.is_over(step):
            return True
        if config.every_tokens is not None:
            return self.sampled // config.every_tokens > self._before // config.every_tokens
        return step % config.every_steps == 0
