"""A policy whose server gets whole weights by broadcast."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from palestra.models.weights import WeightSource
from palestra.types.calls import PolicyVersion
from palestra_engines.external.served_policy import ExternalPolicy, NewWeights
from palestra_engines.vllm.api import VllmApi
from palestra_engines.vllm.weight_rounds import Receiver, WeightRounds


@dataclass(frozen=True, slots=True, eq=False)
class WeightsToSend:
    """New weights in the trainer's memory, to be broadcast.

    Attributes:
        named: all of them, [n, d] or [d], with their names.
    """

    source: WeightSource
    named: Sequence[tuple[str, Tensor]]

    def discard(self) -> None:
        """No effect: the update has created no file."""


@dataclass(kw_only=True, eq=False)
class ServedBroadcast(ExternalPolicy):
    """A policy whose server receives weights together with other servers; see `WeightRounds`."""

    api: VllmApi
    rounds: WeightRounds

    def __post_init__(self) -> None:
        super().__post_init__()
        self._receiver = Receiver(self.api, self._moved)

    def expecting(self, source: WeightSource) -> contextlib.AbstractContextManager[None]:
        """Let the round of these weights wait for this server; see `ExternalPolicy`."""
        return self.rounds.expecting(self._receiver, source)

    def prepare(self, name: str, source: WeightSource, version: PolicyVersion) -> NewWeights:
        """Validate the weights against the server's model, without copying them; see `ExternalPolicy`."""
        return WeightsToSend(source, self.fitting(source))

    async def _load(self, new: NewWeights, version: PolicyVersion) -> None:
        assert isinstance(new, WeightsToSend)
        await self.rounds.receive(self._receiver, new.source, new.named, self.dtype)
        await self.api.finish_update(version)

    def _moved(self, size: int) -> None:
        self.moved_bytes += size

    async def close(self) -> None:
        """Leave this server's groups, and end it; see `ExternalPolicy`."""
        self.rounds.forget(self._receiver)
        await super().close()
