"""Weights on their way to another process: it is told where they are, and reads them there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import ModelError
from palestra.models.saved_weights import SavedWeights
from palestra.models.weight_file import FileWeights
from palestra.models.weights import WeightSource
from palestra.process.codec import decodes

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
