"""The trainer as one of many tenants sees it: with its own policies alone, behind the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import build_loss
from palestra.process.stub import method_of
from palestra.trainer.base import PolicySpec, StepReport, Trainer
from palestra.types.calls import PolicyVersion
from palestra.types.records import TrainSample
from palestra_bases.training.queue import QueuedCall, QueuedPieces, TrainingQueue


def _whole(name: str) -> Any:
    """Return a method of `Trainer` that is a request executed as a whole, when it is the tenant's turn."""
    method = method_of(Trainer, name)

    async def call(self: TenantTrainer, *given: Any, **named: Any) -> Any:
        policy, *arguments = method.ordered(*given, **named)
        full, asked = self._name(policy), dict(zip(method.hints, (policy, *arguments), strict=True))
        request = QueuedCall(self._tenant, full, lambda: getattr(self._trainer, name)(full, *arguments))
        return await asyncio.shield(self._queue.submit(request, asked.get("request_id")))

    return call


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

    optim_step, untrainable, choices, save, save_weights, load, weights = map(
        _whole, ("optim_step", "untrainable", "choices", "save", "save_weights", "load", "weights")
    )

    async def remove(self, policy: str) -> None:
        """Forget a policy, after earlier requests have ended; see `Trainer.remove`."""
        await asyncio.shield(self._queue.submit_removal(self._tenant, self._name(policy)))

    async def close(self) -> None:
        """Finish this tenant's earlier requests, and remove its policies."""
        names = self._queue.policies(self._tenant)
        removals = [self._queue.submit_removal(self._tenant, name) for name in names]
        await asyncio.gather(*map(asyncio.shield, removals))

    def _name(self, policy: str) -> str:
        return f"{self._tenant}/{policy}"
