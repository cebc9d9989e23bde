"""The trainer of a base server, as a job uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.errors import NotFound
from palestra.process.channel import Event
from palestra.process.codec import decode
from palestra.process.stub import proxy, remote_method
from palestra.trainer import checkpoint
from palestra.trainer.base import Trainer
from palestra.types.calls import PolicyVersion
from palestra_bases.link import Link


class RemoteTrainer:
    """The parts of `Trainer` that a job does not leave to the trainer of its base server.

    Rows go there and numbers come back; weights, moments and gradients stay. The server writes checkpoints into the
    job's folder, so both have to be on one machine, or see the same disk under the same path.

    Attributes:
        trainer: the whole; its other methods are called there.
    """

    def __init__(self, link: Link, keep: int) -> None:
        """Use a connection, which this object closes.

        Args:
            keep: number of checkpoints to keep per policy.
        """
        self._link, self._keep = link, keep
        self._versions: dict[str, PolicyVersion] = {}
        link.on_event = self._take
        self.trainer = proxy(Trainer, link.remote, self, "trainer")

    def forget(self) -> None:
        """Drop all policies, because the base server has forgotten the job."""
        self._versions.clear()

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Make the base server write a checkpoint, and remove older ones; see `Trainer.save`."""
        path: Path = await remote_method(Trainer, "save", self._link.remote, "trainer")(
            policy, folder, state, request_id
        )
        checkpoint.keep_newest(folder, self._keep)
        return folder / path.name

    async def remove(self, policy: str) -> None:
        """Make the base server remove a policy; see `Trainer.remove`."""
        await remote_method(Trainer, "remove", self._link.remote, "trainer")(policy)
        del self._versions[policy]

    def version(self, policy: str) -> PolicyVersion:
        """Return the last known version of a policy's master weights."""
        if policy not in self._versions:
            raise NotFound(f"the trainer has no policy {policy!r}")
        return self._versions[policy]

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """Set the incarnation of all later versions; see `Trainer.begin_incarnation`.

        The call is sent after earlier ones, and its error is raised by the next one.
        """
        self._versions[policy] = PolicyVersion(incarnation, self.version(policy).n)
        answer = self._link.remote.post("trainer.begin_incarnation", policy, incarnation)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """Disconnect from the base server, which then frees all policies."""
        await self._link.leave()

    def _take(self, event: Event) -> None:
        if event.name == "version":
            policy, version = decode(tuple[str, PolicyVersion], event.value)
            self._versions[policy] = version
