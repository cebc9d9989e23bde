"""Weights on their way to another process: it is told where they are, and reads them there; and their versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.engine.base import Engine
from palestra.errors import ModelError
from palestra.models.weights import FileWeights, SavedWeights, WeightSource
from palestra.process.channel import Remote
from palestra.process.codec import decodes
from palestra.process.stub import remote_method
from palestra.types.calls import FIRST_VERSION, PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RemoteWeights(WeightSource):
    """The weights that a base server's trainer has of a policy, as a job names them.

    Attributes:
        number: which of the answers of `Trainer.weights` they are.
    """

    policy: str
    number: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Refuse: tensors do not leave the base server."""
        raise ModelError(f"the weights of {self.policy!r} are at a base server, and only its engine reads them")


class SampledVersions:
    """Methods of `Engine` that change a policy's version: called in the other process, and remembered here."""

    def __init__(self, remote: Remote, part: str = "") -> None:
        """Know no policy. `part` of the other side is the engine; see `Server`."""
        self._sync, self._add, self._remove = (
            remote_method(Engine, name, remote, part) for name in ("sync_weights", "add_policy", "remove_policy")
        )
        self._versions: dict[str, PolicyVersion] = {}

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Replace a policy's weights by those of a file or folder; see `Engine.sync_weights`."""
        await self._sync(policy, version, source)
        self._versions[policy] = version

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Add a policy for sampling; see `Engine.add_policy`."""
        await self._add(name, like, version, source)
        self._versions[name] = version

    async def remove_policy(self, name: str) -> None:
        """Free the memory of a policy; see `Engine.remove_policy`."""
        await self._remove(name)
        self._versions.pop(name, None)

    def version(self, policy: str) -> PolicyVersion:
        """Return the weights' version from which a policy is sampled now."""
        return self._versions.get(policy, FIRST_VERSION)


def _source(sent: object) -> WeightSource:
    """Return weights that were sent as a record of their file, their folder or their name."""
    match sent:
        case {"path": str(path)}:
            return FileWeights(Path(path))
        case {"folder": str(folder)}:
            return SavedWeights(Path(folder))
        case {"policy": str(policy), "number": int(number)}:
            return RemoteWeights(policy, number)
    raise ValueError("no weights that another process can read")


decodes(WeightSource, _source)
