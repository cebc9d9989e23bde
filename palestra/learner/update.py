"""The update of one policy: rows, advantages, gradient, optimizer. It knows no algorithm and no loss by name."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from palestra.algorithms.base import Algorithm, CriticUpdate, ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import build_loss
from palestra.algorithms.regularization import Regularization
from palestra.config import JobConfig, reference_of
from palestra.config.budget import TEACHER
from palestra.errors import ConfigError
from palestra.learner.batch import (
    Batch,
    CallChoices,
    Choices,
    make_batch,
    rollout_metrics,
    staleness_metrics,
    staleness_of,
    token_metrics,
)
from palestra.learner.metrics import loss_metrics, with_environments
from palestra.learner.open_run import OpenRun
from palestra.learner.replay import ReplayBuffer
from palestra.learner.reporting import TrainedRow, trained_calls
from palestra.learner.schedule import Stateful, TrainingBudget
from palestra.learner.shares import shares_of
from palestra.learner.teacher import ServedTeacher
from palestra.threads import freed
from palestra.trainer.base import (
    TRAINER_METRICS,
    Network,
    OptimParams,
    OptimReport,
    PolicySpec,
    StepReport,
    Trainer,
)
from palestra.types.records import Trajectory

log = logging.getLogger("palestra.learner")
COUNTS = ("train/rows", "train/trained_tokens", "train/updates_skipped")  # metrics that add up over a step's batches
_BEFORE_UPDATES = frozenset(f"train/{metric.name}" for metric in TRAINER_METRICS if metric.epoch == "first")
# Metrics that compare the policy with what has sampled the tokens. Of a conversation nothing has, and of another run's
# episodes it was another policy.
_OF_SAMPLING = frozenset(
    f"train/{name}" for name in ("logprob_gap_mean", "logprob_gap_max", "sampling_kl", "kl_at_sampling")
)
CRITIC_COUNTS = ("train/critic_updates_skipped",)  # these add up where there is a critic


def policy_spec(config: JobConfig, algorithm: Algorithm, policy: str, weights: Mapping[str, str]) -> PolicySpec:
    """Return what the trainer must create for a policy: its weights and further networks. `weights` are folders that
    replace configured models, by policy; the reference's by `reference_of` its name.
    """
    settings, key = config.algorithm_of(policy), config.algorithm_key(policy)
    model, kl, named = weights.get(policy, config.policies[policy].model), settings.kl, config.teacher_of(policy)
    reference = None
    if kl is not None:
        reference = model if kl.reference is None else weights.get(reference_of(policy), kl.reference)
    if named is None and "teacher_logprobs" in algorithm.needs and settings.served_teacher is None:
        raise ConfigError(
            f"{key}.name is {settings.name!r}, and the job has no policy that teaches: add one to "
            f"[policies] with `frozen = true`, or name a server ({key}.teacher_server)"
        )
    teacher = None if named is None else weights.get(named, config.policies[named].model)
    return PolicySpec(
        model=model,
        reference=reference,
        teacher=teacher,
        critic=None if algorithm.critic is None else algorithm.critic.kind,
        adapter=config.policies[policy].adapter,
        seed=_seed_of(config.seed, policy),
        vision=config.policies[policy].vision,
    )


def _seed_of(seed: int, policy: str) -> int:
    """Return the seed of a policy's new weights, so that two policies of a job begin with different ones."""
    return int.from_bytes(hashlib.sha256(f"{seed} {policy}".encode()).digest()[:7])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passes:
    """The reports of one network's updates in one step.

    Attributes:
        last: of the last epoch's gradients.
        skipped: updates left out because a gradient was not finite.
        trained: the first epoch's rows with their logprobs; empty: not requested.
    """

    first: StepReport
    last: Sequence[StepReport]
    update: OptimReport
    skipped: int
    trained: Sequence[TrainedRow]

    @property
    def counts(self) -> dict[str, float]:
        """Return counts of the last epoch, by full name."""
        forward, flat = (sum(getattr(of, name) for of in self.last) for name in ("forward_tokens", "flat_tokens"))
        return {
            "train/rows": float(sum(report.rows for report in self.last)),
            "train/trained_tokens": float(sum(report.trained_tokens for report in self.last)),
            "train/merged_share": 1.0 - forward / max(flat, 1),
        }


class PolicyUpdate:
    """Trains one policy, one batch of episodes per step."""

    def __init__(
        self, run: OpenRun, trainer: Trainer, budget: TrainingBudget, policy: str, algorithm: Algorithm
    ) -> None:
        """Assemble the update of a policy. The run's store gets the logprobs of trained tokens, and has earlier
        episodes for experience replay; `budget` determines a step's learning rate.
        """
        self._run, self._config, self._trainer, self._budget = run, run.config, trainer, budget
        self._policy, self._algorithm = policy, algorithm
        self._settings = settings = run.config.algorithm_of(policy)
        self._regularization = Regularization(settings)
        self._roles = run.config.players
        self._loss = algorithm.loss()
        self._loss_metrics = build_loss(self._loss).metrics
        served = settings.served_teacher
        meter = None if run.metering is None else run.metering.server("teacher", TEACHER)
        self.teacher = None if served is None else ServedTeacher(served, run.policies.runtime(policy), meter)
        self._choices = CallChoices(trainer, policy, settings.name) if algorithm.every_choice else None
        self._replay = (
            None
            if algorithm.replay is None
            else ReplayBuffer(algorithm.replay, run.store, run.config.seed, policy, self._trainable)
        )

    @property
    def remembered(self) -> dict[str, Stateful]:
        """Return the stateful objects saved with the weights, by their key in the checkpoint."""
        return {"algorithm": self._algorithm, "regularization": self._regularization}

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether the completed episodes of a group have a learning signal for the policy."""
        shares = shares_of(trajectories, self._policy, self._roles)
        return bool(shares) and self._algorithm.learns_from(shares)

    def due(self, step: int) -> bool:
        """Return whether the policy is updated in a step; see `UpdatesConfig`."""
        return self._config.updates_in(self._policy, step)

    def metrics_of(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return metrics of episodes as the policy has played them, by full name, in a step without update."""
        shares = shares_of(trajectories, self._policy, self._roles)
        found = rollout_metrics(shares, self._policy, self._roles, self._settings)
        found |= token_metrics(trajectories, self._roles)
        return {name: value for name, value in found.items() if name != "train/episodes"}  # none of them is trained

    async def make_batch(self, step: int, trajectories: Sequence[Trajectory]) -> Batch:
        """Return the trainable rows.

        The manifest is fixed, so an untrainable episode is left out: otherwise the step would fail forever. The
        trajectories are those of the step's manifest, in canonical order.
        """
        batch = await self._make_batch(trajectories)
        if not batch.samples:
            return batch
        problems = await self._problems(batch, trajectories, f"step {step} check")
        return await self._without(step, batch, problems)

    async def _make_batch(self, trajectories: Sequence[Trajectory], choices: Choices | None = None) -> Batch:
        """Return the rows of episodes, for sampled replies or, with `choices`, for every possible reply."""
        config = self._config
        batch = await asyncio.to_thread(
            make_batch,
            trajectories,
            self._algorithm,
            config.policies[self._policy].sampling.max_tokens,
            self._trainer.version(self._policy),
            self._policy,
            self._roles,
            choices,
        )
        return replace(batch, groups=with_environments(batch.groups)) if config.environments else batch

    async def _problems(self, batch: Batch, trajectories: Sequence[Trajectory], request_id: str) -> dict[str, str]:
        """Return why episodes cannot be trained, by their ids."""
        problems = await self._trainer.untrainable(self._policy, batch.samples, request_id)
        if self._choices is not None:
            left = [trajectory for trajectory in trajectories if trajectory.episode.episode_id not in problems]
            problems = problems | await self._choices.problems(left)
        if self.teacher is not None:
            problems = self.teacher.unanswerable(batch.samples) | problems
        return problems

    async def _trainable(self, name: str, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trainable ones of episodes that are drawn for the first time."""
        problems = await self._problems(await self._make_batch(trajectories), trajectories, f"{name} check")
        return [trajectory for trajectory in trajectories if trajectory.episode.episode_id not in problems]

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        """Make the updates of a step and return its metrics by full name. Without rows there is no update."""
        started = time.monotonic()
        if self._replay is None:
            row = await self._train_batch(step, batch, f"step {step}")
        else:
            row = await self._train_draws(step, batch.metrics, self._replay)
        row["time/train_seconds"] = time.monotonic() - started
        return row

    async def _train_draws(self, step: int, of_step: Mapping[str, float], buffer: ReplayBuffer) -> dict[str, float]:
        """Make the updates from a step's drawn batches, and return its metrics by full name."""
        row = {**of_step, **dict.fromkeys(COUNTS, 0.0)}
        version, ages = self._trainer.version(self._policy), Counter[int]()
        await buffer.begin(step)
        for number in range(buffer.draws):
            drawn = await buffer.draw(step, number)
            choices = None if self._choices is None else await self._choices.of(drawn)
            part = await self._make_batch(drawn, choices)
            ages.update(staleness_of(part.samples, version))
            found = await self._train_batch(step, replace(part, metrics={}), f"step {step} draw {number}")
            await freed(part.groups)
            summed = {name: row.get(name, 0.0) + found[name] for name in (*COUNTS, *CRITIC_COUNTS) if name in found}
            known = of_step.keys() | (_BEFORE_UPDATES if number else frozenset())
            row |= {name: value for name, value in found.items() if name not in known} | summed
        return row | staleness_metrics(ages)

    async def _train_batch(self, step: int, batch: Batch, request: str) -> dict[str, float]:
        """Make the updates from one batch, and return its metrics by full name."""
        # Some algorithms need outputs of the policy before the step: one more forward pass over the rows.
        forward: ForwardOutputs = {}
        if (needs := self._algorithm.needs | self._regularization.outputs) and batch.samples:
            forward = await self._forward(batch, needs)
        critic = self._algorithm.critic
        waits = critic is not None and self._waits(step, critic.warmup_steps)
        # The loss of this step has the coefficient from before, with which its rewards are made as well.
        loss = self._regularization.add_to(self._loss)
        batch, measured, problems = await asyncio.to_thread(self._with_advantages, batch, forward, waits)
        batch = await self._without(step, batch, problems)
        row = batch.metrics | dict.fromkeys(COUNTS, 0.0)
        row |= {f"train/{name}": value for name, value in measured.items() if math.isfinite(value)}
        if batch.samples and critic is not None:
            row |= await self._update_critic(step, batch, critic, request)
        if batch.samples and not waits:
            row |= await self._update(step, batch, loss, request)
        await freed(batch.groups)  # with the rows that have advantages; those without are the caller's
        if self._algorithm.recorded is not None:
            row = {name: value for name, value in row.items() if name not in _OF_SAMPLING}
        return row

    def _waits(self, step: int, warmup_steps: int | None) -> bool:
        """Return whether a step trains the critic alone."""
        return warmup_steps is None or self._config.updates_until(self._policy, step) <= warmup_steps

    def _with_advantages(
        self, batch: Batch, forward: ForwardOutputs, waits: bool
    ) -> tuple[Batch, dict[str, float], dict[str, str]]:
        """Return the batch with advantages, numbers of the regularization, and why episodes are unusable."""
        if batch.samples:
            batch = batch.with_token_rewards(self._regularization.token_rewards(batch.samples, forward))
        remembered = self._algorithm.state()
        # A list of its own, because that of the batch is emptied: an algorithm may keep groups from step to step.
        advantages = self._algorithm.advantages(list(batch.groups), forward)
        if waits:
            # What follows the policy, such as a tuned temperature, would run away while the policy is not trained.
            self._algorithm.restore(remembered)
        measured = self._regularization.adapt(batch.samples, forward)
        batch = batch.with_advantages(advantages, forward)
        return batch, measured, batch.advantage_problems()

    async def _forward(self, batch: Batch, needs: frozenset[ForwardOutput]) -> ForwardOutputs:
        """Return outputs for the rows, from the trainer and a served teacher."""
        if self.teacher is None:
            return await self._trainer.forward(self._policy, batch.samples, needs)
        own = await self._trainer.forward(self._policy, batch.samples, needs - {"teacher_logprobs"})
        return {**own, "teacher_logprobs": await self.teacher.logprobs(batch.samples)}

    async def _without(self, step: int, batch: Batch, problems: Mapping[str, str]) -> Batch:
        """Leave out episodes that cannot be trained, and report why."""
        if not problems:
            return batch
        for episode_id, reason in problems.items():
            log.warning("step %d leaves out episode %s: %s", step, episode_id, reason)
            data = {"step": step, "episode_id": episode_id, "reason": reason}
            whose = {"policy": self._policy} if len(self._config.policies) > 1 else {}
            await self._run.event("episode_untrainable", data | whose)
        return await asyncio.to_thread(batch.without, problems.keys(), self._trainer.version(self._policy))

    async def _update_critic(self, step: int, batch: Batch, critic: CriticUpdate, request: str) -> dict[str, float]:
        taught = await asyncio.to_thread(batch.of_critic)
        if not taught.samples:
            return {}
        rate = self._budget.learning_rate(critic.optimizer, step)
        params = OptimParams.of(critic.optimizer, rate, critic.target_rate)
        made = await self._passes(step, taught, critic.loss, params, critic.epochs, "critic", request)
        await freed(taught.groups)
        row = loss_metrics(made.first, made.last[-1], build_loss(critic.loss).metrics) | made.counts
        row |= {
            "train/critic_grad_norm": made.update.grad_norm,
            "train/critic_updates_skipped": float(made.skipped),
            "train/critic_learning_rate": made.update.learning_rate,
        }
        return {name: value for name, value in row.items() if math.isfinite(value)}  # JSON has no NaN

    async def _update(self, step: int, batch: Batch, loss: LossSpec, request: str) -> dict[str, float]:
        """Update the policy, and return its metrics by full name."""
        optimizer = self._config.policies[self._policy].optimizer
        params = OptimParams.of(optimizer, self._budget.learning_rate(optimizer, step))
        made = await self._passes(step, batch, loss, params, self._settings.epochs, "policy", request)
        if made.trained:
            calls = await asyncio.to_thread(trained_calls, made.trained)
            await self._run.store.trained.record(step, calls)
        row = loss_metrics(made.first, made.last[-1], self._loss_metrics) | made.counts
        row |= {
            "train/grad_norm": made.update.grad_norm,
            "train/updates_skipped": float(made.skipped),
            "train/learning_rate": made.update.learning_rate,
        }
        return {name: value for name, value in row.items() if math.isfinite(value)}  # JSON has no NaN

    async def _passes(
        self,
        step: int,
        batch: Batch,
        loss: LossSpec,
        params: OptimParams,
        epochs: int,
        network: Network,
        request: str,
    ) -> _Passes:
        """Compute gradients and update one network, once per epoch and minibatch."""
        algorithm = self._settings
        whose = "" if network == "policy" else f" {network}"
        reports, last, skipped, trained = list[StepReport](), list[StepReport](), 0, list[TrainedRow]()
        # What is drawn from a replay buffer is of earlier steps, and has been recorded in its own.
        recorded = network == "policy" and self._replay is None
        for epoch in range(epochs):
            # The parts follow from the seed and the step alone, so that a step that is repeated makes the same updates.
            draw = np.random.default_rng((self._config.seed, step, epoch))
            last = []
            parts = await asyncio.to_thread(batch.parts, algorithm.minibatches, algorithm.loss_agg_mode, draw)
            for number, samples in enumerate(parts):
                name = f"{request}{whose} epoch {epoch}" + (f" part {number}" if algorithm.minibatches > 1 else "")
                wanted = recorded and epoch == 0
                report = await self._trainer.forward_backward(self._policy, samples, loss, f"{name} gradient", wanted)
                if report.logprobs is not None:
                    trained += zip(samples, report.logprobs, strict=True)
                update = await self._trainer.optim_step(self._policy, params, f"{name} update", network)
                last.append(report)
                skipped += not update.applied
            reports += last
        return _Passes(first=reports[0], last=last, update=update, skipped=skipped, trained=trained)
