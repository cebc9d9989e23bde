"""The trainer of a base server, as a job uses it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.backend.typed import typed
from palestra.errors import NotFound
from palestra.models.weights import WeightSource
from palestra.process.stub import method_of
from palestra.trainer import checkpoint
from palestra.trainer.base import Trainer
from palestra.types.calls import PolicyVersion
from palestra.types.records import TrainSample
from palestra_bases.link import Link
from palestra_bases.weights import RemoteWeights

F = TypeVar("F", bound=Callable[..., Any])


def _forwarded(method: F) -> F:
    """Return a method that calls the same one of the base server's trainer."""

    async def call(self: RemoteTrainer, *given: Any, **named: Any) -> Any:
        return await self._call(
            method.__name__, **method_of(Trainer, method.__name__).signature.bind(*given, **named).arguments
        )

    return cast(F, wraps(method)(call))


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

    create = _forwarded(Trainer.create)
    forward_backward = _forwarded(Trainer.forward_backward)
    optim_step = _forwarded(Trainer.optim_step)
    untrainable = _forwarded(Trainer.untrainable)
    choices = _forwarded(Trainer.choices)

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """Compute numbers of the trained tokens of rows, without a gradient; see `Trainer.forward`."""
        if not outputs:
            return {}
        found: ForwardOutputs = await self._call("forward", policy, batch=batch, outputs=sorted(outputs))
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
