"""A trainer without a model, for the fake engine: its "weights" are a hash of all that it was trained on.

Two runs end with the same weights exactly when they were given the same samples, in the same order, in the same
steps, which is what tests of faults and of the data plane have to know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import build_loss
from palestra.errors import ConfigError, NotFound
from palestra.faults import fault_point
from palestra.models.weights import LocalWeights, WeightSource
from palestra.schemas.records import PolicyVersion, TrainSample
from palestra.trainer import checkpoint
from palestra.trainer.base import TRAINER_METRICS, OptimParams, OptimReport, PolicySpec, StepReport
from palestra.trainer.serial import Serial
from palestra.trainer.untrainable import record_problems

WEIGHTS_FILE = "weights.txt"


@dataclass(slots=True)
class _Policy:
    weights: str = hashlib.sha256(b"untrained").hexdigest()
    gradient: str = ""
    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(0, 0))
    changed: bool = False  # since the weights were handed out


class FakeTrainer:
    """Implements `Trainer`."""

    def __init__(self, keep: int) -> None:
        """Begin without a policy.

        Args:
            keep: how many checkpoints of a policy are kept.
        """
        self._policies: dict[str, _Policy] = {}
        self._keep = keep
        self._serial = Serial()

    def digest(self, policy: str) -> str:
        """Return the hash of all that a policy was trained on."""
        return self._policy(policy).weights

    def version(self, policy: str) -> PolicyVersion:
        """See `Trainer`."""
        return self._policy(policy).version

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """See `Trainer`."""
        mine = self._policy(policy)
        mine.version = PolicyVersion(incarnation, mine.version.n)

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """See `Trainer`. Without a model all policies begin alike."""
        if policy in self._policies:
            raise ConfigError(f"the trainer has a policy {policy!r} already")
        self._policies[policy] = _Policy()

    async def remove(self, policy: str) -> None:
        """See `Trainer`."""
        self._policy(policy)

        async def work() -> None:
            del self._policies[policy]
            self._serial.forget(policy)

        await self._serial.run(work)

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """See `Trainer`. Without a model logprobs are what the engine said."""
        self._policy(policy)
        if unknown := set(outputs) - {"old_logprobs"}:
            raise ConfigError(f"the fake trainer can't compute {', '.join(sorted(unknown))}")
        return {name: [sample.logprobs for sample in batch] for name in outputs}

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str
    ) -> StepReport:
        """See `Trainer`. The gradient is a hash of the rows, and every metric is 0."""
        mine, metrics = self._policy(policy), build_loss(loss).metrics

        async def work() -> StepReport:
            digest = hashlib.sha256(mine.gradient.encode())
            for sample in batch:
                digest.update(sample.episode_id.encode())
                for array in (
                    sample.ids,
                    sample.loss_mask,
                    sample.logprobs,
                    sample.advantages,
                    sample.loss_weights,
                ):
                    digest.update(array.tobytes())
            mine.gradient = digest.hexdigest()
            tokens = sum(len(sample.ids) for sample in batch)
            return StepReport(
                rows=len(batch),
                trained_tokens=int(sum(sample.loss_mask.sum() for sample in batch)),
                forward_tokens=tokens,
                flat_tokens=tokens,
                metrics={metric.name: 0.0 for metric in (*TRAINER_METRICS, *metrics)},
            )

        return await self._serial.run_idempotent(policy, request_id, work)

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """See `Trainer`. Without a model there are no grammars to walk."""
        return record_problems(batch)

    async def optim_step(self, policy: str, params: OptimParams, request_id: str) -> OptimReport:
        """See `Trainer`."""
        mine = self._policy(policy)

        async def work() -> OptimReport:
            fault_point("before_step")
            mine.weights = hashlib.sha256(f"{mine.weights}{mine.gradient}{params.learning_rate!r}".encode()).hexdigest()
            mine.gradient = ""
            if not mine.changed:
                mine.version, mine.changed = mine.version.following, True
            fault_point("after_step")
            return OptimReport(learning_rate=params.learning_rate, grad_norm=0.0)

        return await self._serial.run_idempotent(policy, request_id, work)

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """See `Trainer`."""
        mine = self._policy(policy)

        def fill(path: Path) -> None:
            (path / WEIGHTS_FILE).write_text(mine.weights)

        async def work() -> Path:
            full = {**state, "incarnation": mine.version.incarnation, "n": mine.version.n}
            return checkpoint.write(folder, int(state["step"]), fill, full, self._keep)

        return await self._serial.run_idempotent(policy, request_id, work)

    async def load(self, policy: str, folder: Path) -> dict[str, Any] | None:
        """See `Trainer`."""
        mine = self._policy(policy)
        newest = checkpoint.newest_good(folder)
        if newest is None:
            return None
        path, state = newest
        mine.weights = (path / WEIGHTS_FILE).read_text()
        mine.version = PolicyVersion(int(state["incarnation"]), int(state["n"]))
        return state

    async def weights(self, policy: str) -> WeightSource:
        """See `Trainer`. There are no tensors."""
        self._policy(policy).changed = False
        return LocalWeights(())

    async def close(self) -> None:
        """See `Trainer`."""

    def _policy(self, policy: str) -> _Policy:
        found = self._policies.get(policy)
        if found is None:
            raise NotFound(f"the trainer has no policy {policy!r}")
        return found
