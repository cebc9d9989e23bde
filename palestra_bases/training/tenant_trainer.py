"""The trainer as one of many tenants sees it: with its own policies alone, behind the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import build_loss
from palestra.models.weights import WeightSource
from palestra.trainer.base import Network, OptimParams, OptimReport, PolicySpec, StepReport
from palestra.types.calls import PolicyVersion
from palestra.types.records import TrainSample
from palestra_bases.training.queue import QueuedCall, QueuedPieces, TrainingQueue

T = TypeVar("T")


class TenantTrainer:
    """A `Trainer` for one tenant of a training queue.

    The trainer knows its policies as `TENANT/POLICY`, so that no tenant can name another's.
    """

    def __init__(self, queue: TrainingQueue, tenant: str) -> None:
        """Send requests as `tenant`."""
        self._queue, self._tenant, self._trainer = queue, tenant, queue.trainer

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's master weights; see `Trainer.version`."""
        return self._trainer.version(self._name(policy))

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """Set the incarnation of a policy's later versions; see `Trainer.begin_incarnation`."""
        self._trainer.begin_incarnation(self._name(policy), incarnation)

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """Load a policy's weights; see `Trainer.create`."""
        name = self._name(policy)
        request = QueuedCall(self._tenant, name, lambda: self._trainer.create(name, spec))
        await asyncio.shield(self._queue.submit_creation(request))

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """Compute `outputs` of the rows of `batch` under the present weights of `policy`; see `Trainer.forward`."""
        name = self._name(policy)
        request = QueuedPieces(self._tenant, name, lambda: self._trainer.forward_pieces(name, batch, outputs))
        found: ForwardOutputs = await asyncio.shield(self._queue.submit(request))
        return found

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str, logprobs: bool = False
    ) -> StepReport:
        """Add the gradient of a batch to a policy, piece by piece; see `Trainer.forward_backward`."""
        build_loss(loss)  # a loss that is not known is no request
        name = self._name(policy)
        pieces = partial(self._trainer.gradient_pieces, name, batch, loss, logprobs)
        report: StepReport = await asyncio.shield(
            self._queue.submit(QueuedPieces(self._tenant, name, pieces), request_id)
        )
        return report

    async def optim_step(
        self, policy: str, params: OptimParams, request_id: str, network: Network = "policy"
    ) -> OptimReport:
        """Apply the gradient of `policy` or of its critic; see `Trainer.optim_step`."""
        name = self._name(policy)
        return await self._do(policy, lambda: self._trainer.optim_step(name, params, request_id, network), request_id)

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """See `Trainer.untrainable`."""
        name = self._name(policy)
        return await self._do(policy, lambda: self._trainer.untrainable(name, batch, request_id), request_id)

    async def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply that could be sampled under a grammar; see `Trainer.choices`."""
        name = self._name(policy)
        return await self._do(policy, lambda: self._trainer.choices(name, grammar, max_tokens, most))

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Write a checkpoint of `policy` into `folder` with `state`, once for each `request_id`; see `Trainer.save`."""
        name = self._name(policy)
        return await self._do(policy, lambda: self._trainer.save(name, folder, state, request_id), request_id)

    async def save_weights(self, policy: str, folder: Path, step: int, request_id: str) -> None:
        """See `Trainer.save_weights`."""
        name = self._name(policy)
        await self._do(policy, lambda: self._trainer.save_weights(name, folder, step, request_id), request_id)

    async def load(self, policy: str, folder: Path, step: int | None = None) -> dict[str, Any] | None:
        """Restore a policy's newest undamaged checkpoint in `folder`, or that of `step`; see `Trainer.load`."""
        name = self._name(policy)
        return await self._do(policy, lambda: self._trainer.load(name, folder, step))

    async def weights(self, policy: str) -> WeightSource:
        """Return the master weights themselves, without a copy; see `Trainer.weights`."""
        name = self._name(policy)
        return await self._do(policy, lambda: self._trainer.weights(name))

    async def remove(self, policy: str) -> None:
        """Forget a policy, after earlier requests have ended; see `Trainer.remove`."""
        await asyncio.shield(self._queue.submit_removal(self._tenant, self._name(policy)))

    async def close(self) -> None:
        """Finish this tenant's earlier requests, and remove its policies."""
        names = self._queue.policies(self._tenant)
        removals = [self._queue.submit_removal(self._tenant, name) for name in names]
        await asyncio.gather(*map(asyncio.shield, removals))

    def _name(self, policy: str) -> str:
        """Return the name of a policy in the trainer."""
        return f"{self._tenant}/{policy}"

    async def _do(self, policy: str, call: Callable[[], Awaitable[T]], request_id: str | None = None) -> T:
        """Do a request in one go when it is its turn."""
        request = QueuedCall(self._tenant, self._name(policy), call)
        found: T = await asyncio.shield(self._queue.submit(request, request_id))
        return found
