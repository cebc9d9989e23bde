"""What happens when: the learning rate of each step, a job's end by its budget, its evaluations and its checkpoints."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from palestra.config import JobConfig, OptimizerConfig
from palestra.doctor.rule import VALIDATION
from palestra.errors import CheckpointError
from palestra.learner.open_run import AddEvent
from palestra.store import Groups, RunLog
from palestra.trainer.base import Trainer
from palestra.trainer.checkpoint import BEST, best_weights, common_steps, remove_after, step_of, without_optimizer
from palestra.trainer.checkpoint import found as found_in


def learning_rate(config: OptimizerConfig, step: int, steps: int, sampled_share: float | None = None) -> float:
    """Return the learning rate of a step.

    After warm-up the rate is that of transformers' `get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup`: it would be zero one step after the last, so that every step trains. Or it is
    that of `get_inverse_sqrt_schedule` with the warm-up as time scale. During warm-up the rate is one step ahead of
    theirs, whose first rate of 0 would waste a step's episodes. Steps count from 1. `sampled_share` is the fraction of
    the job's token budget sampled before the step, which then determines the decay.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "inverse_sqrt":
        scale = max(config.warmup_steps, 1)
        return config.learning_rate * math.sqrt(scale / max(step - 1, scale))
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
        if self.is_over(step) or not config.is_on:
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
        if not config.is_on:
            return False
        if step == 0 or self.is_over(step):
            return True
        if config.every_tokens is not None:
            return self.sampled // config.every_tokens > self._before // config.every_tokens
        return step % config.every_steps == 0


log = logging.getLogger("palestra.learner")


class Stateful(Protocol):
    """An object with a state from step to step."""

    def state(self) -> dict[str, Any]:
        """Return the state, as JSON; empty: none."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state`; empty in checkpoints without it."""
        ...


class CheckpointSchedule:
    """Writes the checkpoints of the trained policies, one after another; frozen policies have none."""

    def __init__(
        self,
        config: JobConfig,
        trainer: Trainer,
        folders: Mapping[str, Path],
        remembered: Mapping[str, Mapping[str, Stateful]],
        wall_seconds: Callable[[], float],
        add_event: AddEvent,
    ) -> None:
        """Create the schedule; checkpoints are unknown until `load`.

        `folders` are those of checkpoints, by trained policy; `remembered` are stateful objects that are saved with the
        weights of each, by their key in the checkpoint; `wall_seconds` returns how long the job has run.
        """
        self._config, self._trainer, self._folders = config, trainer, dict(folders)
        self._remembered, self._wall_seconds, self._add_event = remembered, wall_seconds, add_event
        self._saving: asyncio.Task[None] | None = None
        self._seconds = 0.0  # time of checkpoints since the last `take_seconds`
        self._best = -math.inf  # validation reward of the best weights that are kept
        self.saved_step = 0  # step of the newest checkpoint

    async def load(self) -> dict[str, Any] | None:
        """Load the newest undamaged checkpoints of one step into the trainer, with saved states.

        Return the state saved with one of them, or None without checkpoints.
        """
        newest_step = max((step_of(path) for folder in self._folders.values() for path in found_in(folder)), default=0)
        if len(self._folders) == 1:
            ((policy, folder),) = self._folders.items()
            newest = await self._trainer.load(policy, folder)
            states = {} if newest is None else {policy: newest}
        else:
            states = await self._load_common()
        for policy, state in states.items():
            for key, one in self._remembered[policy].items():
                one.restore(state.get(key, {}))
        found = list(states.values())
        self.saved_step = int(found[0]["step"]) if found else 0
        if self.saved_step < newest_step:
            text = (
                f"the checkpoint of step {newest_step} is damaged or incomplete (the log says which file); training "
                f"goes on after step {self.saved_step}"
            )
            await self._add_event("warning", {"code": "checkpoint_damaged", "step": self.saved_step, "text": text})
        return found[0] if found else None

    async def _load_common(self) -> dict[str, dict[str, Any]]:
        """Load the newest step with undamaged checkpoints of all policies; return the states by policy, or nothing."""
        steps = common_steps(self._folders.values())
        for step in steps:
            try:
                found = {name: await self._trainer.load(name, folder, step) for name, folder in self._folders.items()}
            except CheckpointError as error:
                log.warning("step %d can't be loaded: %s; trying the one before", step, error)
                continue
            break
        else:
            if steps:
                raise CheckpointError(
                    f"there is no step of which all policies have an undamaged checkpoint (tried {steps}); move the "
                    "folder of checkpoints away to train again from the recorded episodes"
                )
            step, found = 0, {}
        # Some policies may have a later one. It is not the job's, and would later take the place of one that is.
        for folder in self._folders.values():
            remove_after(folder, step)
        return {name: state for name, state in found.items() if state is not None}

    async def save_if_due(self, step: int, last: bool) -> None:
        """Begin to write a checkpoint of this step if it is due, while the next episodes are played. `last`: training
        ends with it.
        """
        if step % self._config.checkpoint.every_steps == 0 or last:
            await self.finish()
            self._saving = asyncio.create_task(self._save(step, self._states(step)))

    async def save_now(self, step: int) -> None:
        """Write a checkpoint of this step, unless there is one, and return when it is on disk."""
        await self.finish()
        if step > self.saved_step:
            await self._save(step, self._states(step))

    def know_best(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Restore how well the best kept weights have validated, after a restart. `rows` are the metrics of all
        finished steps.
        """
        for folder in self._folders.values():
            if (best := best_weights(folder)) is not None:
                found = (row[VALIDATION] for row in rows if row["step"] == best[1] and VALIDATION in row)
                self._best = next(found, -math.inf)

    async def keep_best(self, step: int, row: Mapping[str, float]) -> None:
        """Write the weights next to the checkpoints if no earlier ones validated better; never in self-play. The step
        was just validated; step 0 has the initial weights.
        """
        reward = row.get(VALIDATION)
        # Where opponents get better, too, validations of different steps can't be compared.
        rivals = len(self._folders) > 1 or bool(self._config.players.pools)
        if rivals or step == 0 or reward is None or reward < self._best:
            return
        started = time.monotonic()
        ((policy, folder),) = self._folders.items()
        await self._trainer.save_weights(policy, folder / BEST, step, f"best {step}")
        self._best = reward
        self._seconds += time.monotonic() - started

    async def finish(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def close(self) -> None:
        """Wait for a checkpoint that is being written; only log a failure."""
        if self._saving is not None:
            (error,) = await asyncio.gather(self._saving, return_exceptions=True)
            if isinstance(error, Exception):
                log.error("a checkpoint could not be written: %s: %s", type(error).__name__, error)

    def take_seconds(self) -> float:
        """Return the seconds spent on checkpoints finished since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _states(self, step: int) -> dict[str, dict[str, Any]]:
        """Return the JSON saved with each policy's weights of a step."""
        state = {"step": step, "wall_seconds": self._wall_seconds(), "config_digest": self._config.digest()}
        # The states are taken now: while the checkpoint is written, the next step may change them.
        return {
            policy: state | {key: own for key, one in self._remembered[policy].items() if (own := one.state())}
            for policy in self._folders
        }

    async def _save(self, step: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        started = time.monotonic()
        # All are asked for before the first is written, so that no update of the next step comes between them.
        saves = (self._trainer.save(name, at, states[name], f"save {step}") for name, at in self._folders.items())
        found = await asyncio.gather(*saves, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error
        paths = {policy: path for policy, path in zip(self._folders, found, strict=True) if isinstance(path, Path)}
        if not self._config.checkpoint.optimizer:
            for path in paths.values():
                await asyncio.to_thread(without_optimizer, path)
        self.saved_step = step
        self._seconds += (seconds := time.monotonic() - started)
        for policy, path in paths.items():
            whose = {"policy": policy} if len(self._config.policies) > 1 else {}
            await self._add_event("saved", {"step": step, "path": str(path), "seconds": seconds, **whose})
