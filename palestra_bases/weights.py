"""Weights that stay where they are: a job only names them, and the base server hands them from trainer to engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import ModelError
from palestra.models.saved_weights import SavedWeights
from palestra.models.weights import WeightSource

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RemoteWeights(WeightSource):
    """The weights that a base server's trainer has of a policy, as a job names them.

    Attributes:
        policy: whose weights these are.
        number: which of the answers of `Trainer.weights` they are.
    """

    policy: str
    number: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Refuse: tensors do not leave the base server.

        Raises:
            ModelError: always.
        """
        raise ModelError(f"the weights of {self.policy!r} are at a base server, and only its engine reads them")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsPlace:
    """Where a base server finds weights.

    Attributes:
        policy, number: of `RemoteWeights`; None: they are in a folder.
        folder: of `SavedWeights`; None: the trainer has them.
    """

    policy: str | None = None
    number: int | None = None
    folder: Path | None = None


def place_of_weights(source: WeightSource) -> WeightsPlace:
    """Return where a base server finds the weights of a source.

    Raises:
        ModelError: they are tensors of this process.
    """
    if isinstance(source, RemoteWeights):
        return WeightsPlace(policy=source.policy, number=source.number)
    if isinstance(source, SavedWeights):
        return WeightsPlace(folder=source.folder.absolute())
    raise ModelError("a base server takes weights from its own trainer or from a folder, and none over the socket")
