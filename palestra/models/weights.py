"""The weights of a policy on their way from a trainer to `Engine.sync_weights`.

Trainer and engine do not know each other. A source stands between them, and says how the tensors travel: as they are,
where both are in one process, or by a folder. This module loads no torch, because the fake trainer and the fake engine
run without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(ABC):
    """The weights of one version of a policy, for an engine to read.

    A source is valid until the trainer takes its next optimizer step: an engine copies what it needs before
    `sync_weights` returns.
    """

    __slots__ = ()

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight once, as (name, tensor), under the names of `CausalLM.own_parameters`.

        Tensors have the shapes of the parameters: matrices [n, d], norms and biases [d].
        """


@dataclass(frozen=True, slots=True)
class LocalWeights(WeightSource):
    """Weights that are tensors of this process; they are not copied until an engine reads them.

    Attributes:
        named: each weight once, with its name.
    """

    named: Sequence[tuple[str, Tensor]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors themselves, [n, d] or [d], which change with the trainer's next update.

        See `WeightSource`.
        """
        return iter(self.named)
