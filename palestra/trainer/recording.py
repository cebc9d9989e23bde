"""A trainer without a model, for the scripted engine: its "weights" are a hash of all that it was trained on.

Two runs end with the same weights exactly when they were given the same samples, in the same order, in the same
steps, which is what tests of faults and of the data plane have to know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.faults import fault_point
from palestra.schemas.protocols import Engine, OptimReport, StepReport
from palestra.schemas.records import Floats, PolicyVersion, TrainSample
from palestra.trainer import checkpoint
from palestra.trainer.serial import Serial
from palestra.trainer.untrainable import record_problems

WEIGHTS_FILE = "weights.txt"


class RecordingTrainer:
    """Implements `Trainer`."""

    def __init__(self, keep: int) -> None:
        self.weights = hashlib.sha256(b"untrained").hexdigest()
        self._pending = ""
        self._keep = keep
        self._version = PolicyVersion(0, 0)
        self._changed = False  # since they were published
        self._serial = Serial()

    def version(self, policy: str) -> PolicyVersion:
        """See `Trainer`."""
        return self._version

    def begin_incarnation(self, incarnation: int) -> None:
        """See `TorchTrainer`."""
        self._version = PolicyVersion(incarnation, self._version.n)

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: Callable[..., Any], request_id: str
    ) -> StepReport:
        """See `Trainer`."""

        async def work() -> StepReport:
            digest = hashlib.sha256(self._pending.encode())
            for sample in batch:
                digest.update(sample.episode_id.encode())
                for array in (
                    sample.ids,
                    sample.loss_mask,
                    sample.logprobs,
                    sample.advantages,
                    sample.weights,
                ):
                    digest.update(array.tobytes())
            self._pending = digest.hexdigest()
            tokens = sum(len(sample.ids) for sample in batch)
            return StepReport(
                rows=len(batch),
                trained_tokens=int(sum(sample.loss_mask.sum() for sample in batch)),
                forward_tokens=tokens,
                flat_tokens=tokens,
                metrics={
                    "loss": 0.0,
                    "entropy": 0.0,
                    "ratio": 1.0,
                    "clipped": 0.0,
                    "clipped_on_policy": 0.0,
                    "gap": 0.0,
                    "gap_max": 0.0,
                },
            )

        return await self._serial.once(request_id, work)

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """See `Trainer`. Without a model there are no grammars to walk."""
        return record_problems(batch)

    async def logprobs(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> list[Floats]:
        """See `Trainer`. Without a model they are what the engine said."""
        return [sample.logprobs for sample in batch]

    async def optim_step(self, policy: str, learning_rate: float, request_id: str) -> OptimReport:
        """See `Trainer`."""

        async def work() -> OptimReport:
            fault_point("before_step")
            self.weights = hashlib.sha256(f"{self.weights}{self._pending}{learning_rate!r}".encode()).hexdigest()
            self._pending = ""
            if not self._changed:  # several updates between two publications are one version
                self._version, self._changed = self._version.following, True
            fault_point("after_step")
            return OptimReport(learning_rate=learning_rate, grad_norm=0.0)

        return await self._serial.once(request_id, work)

    async def save(self, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """See `Trainer`."""

        async def work() -> Path:
            full = {**state, "incarnation": self._version.incarnation, "n": self._version.n}
            fill: Callable[[Path], object] = lambda path: (path / WEIGHTS_FILE).write_text(self.weights)  # noqa: E731
            return checkpoint.write(folder, int(state["step"]), fill, full, self._keep)

        return await self._serial.once(request_id, work)

    async def load(self, folder: Path) -> dict[str, Any] | None:
        """See `Trainer`."""
        newest = checkpoint.newest_good(folder)
        if newest is None:
            return None
        path, state = newest
        self.weights = (path / WEIGHTS_FILE).read_text()
        self._version = PolicyVersion(int(state["incarnation"]), int(state["n"]))
        return state

    async def publish(self, policy: str, engine: Engine, request_id: str) -> PolicyVersion:
        """See `Trainer`."""

        async def work() -> PolicyVersion:
            fault_point("before_publish")
            await engine.update_weights(policy, self._version, self.weights)
            self._changed = False
            fault_point("after_publish")
            return self._version

        return await self._serial.once(request_id, work)

    async def close(self) -> None:
        """See `Trainer`."""
