"""A trainer without a model, for the fake engine: its "weights" are a hash of all its training data.

Two runs end with equal weights exactly if they got the same samples in the same order and steps. Tests of faults and of
the data plane rely on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from palestra.algorithms.base import CriticKind, ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec, ValueLoss
from palestra.algorithms.losses import build_loss
from palestra.errors import ConfigError
from palestra.faults import fault_point
from palestra.models.weights import LocalWeights, WeightSource
from palestra.threads import in_thread
from palestra.trainer import checkpoint
from palestra.trainer.base import (
    CRITIC_METRICS,
    NETWORKS,
    REFERENCE_METRICS,
    TRAINER_METRICS,
    Network,
    OptimParams,
    OptimReport,
    PolicySpec,
    StepReport,
    record_problems,
)
from palestra.trainer.serial import PolicyTrainer, VersionedPolicy
from palestra.types.records import TrainSample

WEIGHTS_FILE, CRITIC_FILE = "weights.txt", "critic.txt"
_CRITIC_OUTPUTS: Mapping[CriticKind | None, frozenset[ForwardOutput]] = {
    None: frozenset(),
    "states": frozenset({"values", "next_values"}),
    "actions": frozenset({"action_values", "target_action_values"}),
    "replies": frozenset({"action_values"}),
}
_UNTRAINED = hashlib.sha256(b"untrained").hexdigest()


@dataclass
class _Policy(VersionedPolicy):
    """Hashes in place of a policy's weights and gradients, and its version."""

    spec: PolicySpec
    weights: dict[Network, str] = field(default_factory=lambda: dict.fromkeys(NETWORKS, _UNTRAINED))
    gradients: dict[Network, str] = field(default_factory=lambda: dict.fromkeys(NETWORKS, ""))


class FakeTrainer(PolicyTrainer[_Policy]):
    """A `Trainer` for tests and demonstrations without a model: it hashes its inputs instead of computing."""

    def __init__(self, keep: int) -> None:
        super().__init__()
        self._keep = keep

    def digest(self, policy: str) -> str:
        """Return the hash of everything that the policy was trained on."""
        return self._policy(policy).weights["policy"]

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """Create a policy; see `Trainer.create`. Without a model all policies begin alike."""
        self._check_new(policy)
        self._policies[policy] = _Policy(spec)

    async def remove(self, policy: str) -> None:
        """Forget a policy and its requests, after earlier requests have ended; see `Trainer.remove`."""
        self._policy(policy)

        async def work() -> None:
            del self._policies[policy]
            self._serial.forget(policy)

        await self._serial.run(work)

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """Return the engine's logprobs of the rows: there is no model to compute others.

        All values of the critic are equal, and derived from its hash.
        """
        mine = self._policy(policy)
        known = {"old_logprobs"} | ({"reference_logprobs"} if mine.spec.reference is not None else set())
        known |= {"teacher_logprobs"} if mine.spec.teacher is not None else set()
        values = _CRITIC_OUTPUTS[mine.spec.critic]
        if unknown := set(outputs) - known - values:
            raise ConfigError(f"the fake trainer can't compute {', '.join(sorted(unknown))} of this policy")
        value = np.float32(int(mine.weights["critic"][:8], 16) / 2**32)
        return {
            name: [
                np.where(row.loss_mask, value, np.float32(np.nan)) if name in values else row.logprobs for row in batch
            ]
            for name in outputs
        }

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str, logprobs: bool = False
    ) -> StepReport:
        """Add the rows of `batch` to the hash that represents the gradient; see `Trainer.forward_backward`.

        All metrics are 0; the reported logprobs are the engine's.
        """
        mine, built = self._policy(policy), build_loss(loss)
        network: Network = "critic" if isinstance(built, ValueLoss) else "policy"
        _check(mine, network)
        reference = REFERENCE_METRICS if batch and batch[0].reference_logprobs is not None else ()
        metrics = (*(CRITIC_METRICS if network == "critic" else (*TRAINER_METRICS, *reference)), *built.metrics)

        def work() -> StepReport:
            digest = hashlib.sha256(mine.gradients[network].encode())
            if loss.kl_coefficient or loss.entropy_coefficient:
                digest.update(loss.model_dump_json().encode())
            for sample in batch:
                digest.update(sample.episode_id.encode())
                for array in (
                    sample.ids,
                    sample.loss_mask,
                    sample.logprobs,
                    sample.advantages,
                    sample.loss_weights,
                    *(column for column in (sample.values, sample.returns) if column is not None),
                ):
                    digest.update(array.tobytes())
            mine.gradients[network] = digest.hexdigest()
            tokens = sum(len(sample.ids) for sample in batch)
            return StepReport(
                rows=len(batch),
                trained_tokens=int(sum(sample.loss_mask.sum() for sample in batch)),
                forward_tokens=tokens,
                flat_tokens=tokens,
                metrics={metric.name: 0.0 for metric in metrics},
                logprobs=tuple(np.where(row.loss_mask, row.logprobs, np.nan) for row in batch) if logprobs else None,
            )

        return await self._serial.run_idempotent(policy, request_id, lambda: in_thread(work))

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """Find episodes of `batch` with numbers that are not finite; see `Trainer.untrainable`.

        `policy` and `request_id` are not used, because without a model there are no grammars to walk.
        """
        return await in_thread(lambda: record_problems(batch))

    async def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Raise ConfigError: without a model there are no tokens."""
        raise ConfigError("the fake trainer has no tokens, so it can't say which replies a grammar allows")

    async def optim_step(
        self, policy: str, params: OptimParams, request_id: str, network: Network = "policy"
    ) -> OptimReport:
        """Hash the gradient and the learning rate into the policy's weights; see `Trainer.optim_step`."""
        mine = self._policy(policy)
        _check(mine, network)

        async def work() -> OptimReport:
            if network == "policy":
                fault_point("before_step")
            whole = f"{mine.weights[network]}{mine.gradients[network]}{params.learning_rate!r}"
            mine.weights[network], mine.gradients[network] = hashlib.sha256(whole.encode()).hexdigest(), ""
            if network == "policy":
                mine.count_update()
                fault_point("after_step")
            return OptimReport(learning_rate=params.learning_rate, grad_norm=0.0)

        return await self._serial.run_idempotent(policy, request_id, work)

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Write the hash of `policy` as a checkpoint into `folder`, with `state`; once for each `request_id`."""
        mine = self._policy(policy)

        def fill(path: Path) -> None:
            (path / WEIGHTS_FILE).write_text(mine.weights["policy"], encoding="utf-8")
            if mine.spec.critic:
                (path / CRITIC_FILE).write_text(mine.weights["critic"], encoding="utf-8")

        async def work() -> Path:
            return checkpoint.write(folder, int(state["step"]), fill, mine.stored(state), self._keep)

        return await self._serial.run_idempotent(policy, request_id, work)

    async def save_weights(self, policy: str, folder: Path, step: int, request_id: str) -> None:
        """Write the hash of `policy` after `step` to `folder`, once for each `request_id`."""
        mine = self._policy(policy)

        async def work() -> None:
            weights = mine.weights["policy"]
            checkpoint.write_weights_folder(
                folder, step, lambda path: (path / WEIGHTS_FILE).write_text(weights, encoding="utf-8"), mine.stored({})
            )

        await self._serial.run_idempotent(policy, request_id, work)

    async def load(self, policy: str, folder: Path, step: int | None = None) -> dict[str, Any] | None:
        """Restore the hash and the version of a policy from a checkpoint in `folder`, by `step`; see `Trainer.load`."""
        mine = self._policy(policy)
        found = checkpoint.good(folder, step)
        if found is None:
            return None
        path, state = found
        mine.weights["policy"] = (path / WEIGHTS_FILE).read_text(encoding="utf-8")
        if mine.spec.critic:
            mine.weights["critic"] = (path / CRITIC_FILE).read_text(encoding="utf-8")
        mine.restore_version(state)
        return state

    async def weights(self, policy: str) -> WeightSource:
        """Return a source without tensors, which the fake engine accepts; see `Trainer.weights`."""
        self._policy(policy).changed = False
        return LocalWeights(())

    async def close(self) -> None:
        """Do nothing: there are no processes and no memory to free."""


def _check(policy: _Policy, network: Network) -> None:
    """Raise ConfigError if a network is asked for that a policy does not have."""
    if network == "critic" and not policy.spec.critic:
        raise ConfigError("this policy has no critic")
