"""The trainer of a base server, as a job uses it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.backend.typed import typed
from palestra.errors import NotFound
from palestra.models.weights import WeightSource
from palestra.process.stub import method_of
from palestra.trainer import checkpoint
from palestra.trainer.base import Network, OptimParams, OptimReport, PolicySpec, StepReport, Trainer
from palestra.types.calls import PolicyVersion
from palestra.types.records import TrainSample
from palestra_bases.link import Link
from palestra_bases.weights import RemoteWeights


class RemoteTrainer:
    """Implements `Trainer` with the trainer of a base server.

    Rows go there and numbers come back; weights, moments and gradients stay. The server writes checkpoints into the
    job's folder, so both have to be on one machine, or see the same disk under the same path.
    """

    def __init__(self, link: Link, keep: int) -> None:
        """Use a connection.

        Args:
            link: to the base server; this object closes it.
            keep: how many checkpoints of a policy are kept.
        """
        self._link, self._keep = link, keep
        self._versions: dict[str, PolicyVersion] = {}

    def forget(self) -> None:
        """Forget all policies, because the base server has forgotten the job."""
        self._versions.clear()

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """Have the base server load a policy's adapter; see `Trainer.create`."""
        await self._call("create", policy, spec=spec)

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """Compute numbers of the trained tokens of rows, without a gradient; see `Trainer.forward`."""
        if not outputs:
            return {}
        found: ForwardOutputs = await self._call("forward", policy, batch=batch, outputs=sorted(outputs))
        return found

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str, logprobs: bool = False
    ) -> StepReport:
        """Add the gradient of a batch; see `Trainer.forward_backward`."""
        report: StepReport = await self._call(
            "forward_backward", policy, batch=batch, loss=loss, request_id=request_id, logprobs=logprobs
        )
        return report

    async def optim_step(
        self, policy: str, params: OptimParams, request_id: str, network: Network = "policy"
    ) -> OptimReport:
        """Apply the gradient and clear it; see `Trainer.optim_step`."""
        report: OptimReport = await self._call(
            "optim_step", policy, params=params, request_id=request_id, network=network
        )
        return report

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """Find episodes that can't be trained; see `Trainer.untrainable`."""
        found: dict[str, str] = await self._call("untrainable", policy, batch=batch, request_id=request_id)
        return found

    async def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply that could be sampled under a grammar; see `Trainer.choices`."""
        found: tuple[tuple[int, ...], ...] = await self._call(
            "choices", policy, grammar=grammar, max_tokens=max_tokens, most=most
        )
        return found

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Have the base server write a checkpoint; see `Trainer.save`. Older ones are removed here."""
        path: Path = await self._call("save", policy, folder=_absolute(folder), state=state, request_id=request_id)
        checkpoint.keep_newest(folder, self._keep)
        return folder / path.name

    async def save_weights(self, policy: str, folder: Path, step: int, request_id: str) -> None:
        """Have the base server write a policy's weights; see `Trainer.save_weights`."""
        await self._call("save_weights", policy, folder=_absolute(folder), step=step, request_id=request_id)

    async def load(self, policy: str, folder: Path, step: int | None = None) -> dict[str, Any] | None:
        """Have the base server restore a checkpoint; see `Trainer.load`."""
        state: dict[str, Any] | None = await self._call("load", policy, folder=_absolute(folder), step=step)
        return state

    async def remove(self, policy: str) -> None:
        """Have the base server forget a policy; see `Trainer.remove`."""
        await self._call("remove", policy)
        del self._versions[policy]

    async def weights(self, policy: str) -> WeightSource:
        """Name the present weights for the base server's engine; see `Trainer.weights`."""
        frame = await self._link.call("base.weights", {"policy": policy})
        return RemoteWeights(policy, typed(int, frame.header["result"], frame.arrays, "result"))

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's master weights, as the base server has said it last.

        Raises:
            NotFound: there is no such policy.
        """
        if policy not in self._versions:
            raise NotFound(f"the trainer has no policy {policy!r}")
        return self._versions[policy]

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """Set the incarnation of all later versions; see `Trainer.begin_incarnation`.

        The base server gets the call after those that were made before, and an error of it comes with the next one.
        """
        self._versions[policy] = PolicyVersion(incarnation, self.version(policy).n)
        self._link.post("base.begin_incarnation", {"policy": policy, "incarnation": incarnation})

    async def close(self) -> None:
        """Say goodbye to the base server, which then frees all policies."""
        await self._link.close()

    async def _call(self, name: str, policy: str, **arguments: Any) -> Any:
        """Call a method of the base server's trainer, and note the policy's version."""
        method = method_of(Trainer, name)
        frame = await self._link.call(f"trainer.{name}", {"policy": policy, **arguments})
        if (version := frame.header.get("version")) is not None:
            self._versions[policy] = typed(PolicyVersion, version, frame.arrays, "version")
        return typed(method.returns, frame.header["result"], frame.arrays, "result")


def _absolute(folder: Path) -> Path:
    """Return the path under which another process of this machine finds a folder."""
    return folder.absolute()
