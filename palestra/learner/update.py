"""The update of one policy: rows, advantages, gradient, optimizer. It knows no algorithm and no loss by name."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from palestra.algorithms.base import Algorithm, ForwardOutputs
from palestra.algorithms.losses import build_loss
from palestra.config import JobConfig
from palestra.learner.batch import Batch, make_batch
from palestra.learner.budget import TrainingBudget
from palestra.learner.metrics import loss_metrics
from palestra.learner.shares import share_of
from palestra.trainer.base import OptimParams, StepReport, Trainer
from palestra.types.records import Trajectory

log = logging.getLogger("palestra.learner")
AddEvent = Callable[[str, dict[str, Any]], Awaitable[None]]


class PolicyUpdate:
    """Trains one policy, one batch of episodes per step."""

    def __init__(
        self,
        config: JobConfig,
        trainer: Trainer,
        algorithm: Algorithm,
        policy: str,
        budget: TrainingBudget,
        add_event: AddEvent,
    ) -> None:
        """Assemble the update of a policy.

        Args:
            config: the job.
            trainer: the trainer that has the policy.
            algorithm: makes advantages of rewards, and names the loss.
            policy: name of the policy.
            budget: knows how far the training is, and so the learning rate of a step.
            add_event: records an event of the job.
        """
        self._budget = budget
        self._config, self._trainer, self._algorithm, self._policy = config, trainer, algorithm, policy
        self._roles, self._add_event = config.players, add_event
        self._loss = algorithm.loss()
        self._loss_metrics = build_loss(self._loss).metrics

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether the policy can learn anything from the completed episodes of a group."""
        return self._algorithm.learns_from([share_of(t, self._policy, self._roles) for t in trajectories])

    async def make_batch(self, step: int, trajectories: Sequence[Trajectory]) -> Batch:
        """Return the rows that can be trained.

        The manifest is fixed, so an episode that can't be trained is left out: otherwise the step would fail for ever.

        Args:
            step: number of the step.
            trajectories: the episodes of the step's manifest, in canonical order.
        """
        config, version = self._config, self._trainer.version(self._policy)
        max_tokens = config.policies[self._policy].sampling.max_tokens
        batch = await asyncio.to_thread(
            make_batch,
            trajectories,
            self._algorithm,
            config.algorithm,
            max_tokens,
            version,
            self._policy,
            self._roles,
        )
        if not batch.samples:
            return batch
        problems = await self._trainer.untrainable(self._policy, batch.samples, f"step {step} check")
        return await self._without(step, batch, problems)

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        """Make the updates of a step and return its metrics by full name. Without rows there is no update.

        Args:
            step: number of the step.
            batch: the batch that `make_batch` returned.
        """
        started = time.monotonic()
        # Some algorithms need outputs of the policy before the step: one more forward pass over the rows.
        forward: ForwardOutputs = {}
        if self._algorithm.needs and batch.samples:
            forward = await self._trainer.forward(self._policy, batch.samples, self._algorithm.needs)
        advantages = await asyncio.to_thread(self._algorithm.advantages, batch.groups, forward)
        batch = batch.with_advantages(advantages, forward)
        batch = await self._without(step, batch, batch.advantage_problems())
        row = batch.metrics | {"train/rows": 0.0, "train/trained_tokens": 0.0, "train/updates_skipped": 0.0}
        if batch.samples:
            row |= await self._update(step, batch)
        row["time/train_seconds"] = time.monotonic() - started
        return row

    async def _without(self, step: int, batch: Batch, problems: Mapping[str, str]) -> Batch:
        """Leave out episodes that can't be trained, and report why."""
        if not problems:
            return batch
        for episode_id, reason in problems.items():
            log.warning("step %d leaves out episode %s: %s", step, episode_id, reason)
            data = {"step": step, "episode_id": episode_id, "reason": reason}
            whose = {"policy": self._policy} if len(self._config.policies) > 1 else {}
            await self._add_event("episode_untrainable", data | whose)
        return batch.without(problems.keys(), self._trainer.version(self._policy))

    async def _update(self, step: int, batch: Batch) -> dict[str, float]:
        """Compute the gradient and update the policy, once per epoch and minibatch."""
        optimizer = self._config.policies[self._policy].optimizer
        params = OptimParams.of(optimizer, self._budget.learning_rate(optimizer, step))
        algorithm = self._config.algorithm
        reports, last, skipped = list[StepReport](), list[StepReport](), 0
        for epoch in range(algorithm.epochs):
            # The parts follow from the seed and the step alone, so that a step that is repeated makes the same updates.
            draw = np.random.default_rng((self._config.seed, step, epoch))
            last = []
            for number, samples in enumerate(batch.parts(algorithm.minibatches, algorithm.loss_agg_mode, draw)):
                name = f"step {step} epoch {epoch}" + (f" part {number}" if algorithm.minibatches > 1 else "")
                report = await self._trainer.forward_backward(self._policy, samples, self._loss, f"{name} gradient")
                update = await self._trainer.optim_step(self._policy, params, f"{name} update")
                last.append(report)
                skipped += not update.applied
            reports += last
        forward, flat = (sum(getattr(of, name) for of in last) for name in ("forward_tokens", "flat_tokens"))
        row = loss_metrics(reports[0], reports[-1], self._loss_metrics) | {
            "train/rows": float(sum(report.rows for report in last)),
            "train/trained_tokens": float(sum(report.trained_tokens for report in last)),
            "train/merged_share": 1.0 - forward / max(flat, 1),
            "train/grad_norm": update.grad_norm,
            "train/updates_skipped": float(skipped),
            "train/learning_rate": update.learning_rate,
        }
        return {name: value for name, value in row.items() if math.isfinite(value)}  # JSON has no NaN
