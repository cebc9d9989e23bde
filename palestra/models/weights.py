"""The transfer of a policy's weights from a trainer to `Engine.sync_weights`.

Trainer and engine do not know each other. A source decides how tensors travel: directly within one process, or by a
folder. This module does not import torch, because the fake trainer and engine run without it.
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

    A source is valid until the trainer's next optimizer step: an engine copies what it needs before `sync_weights`
    returns.
    """

    __slots__ = ()

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight once, as (name, tensor), under the names of `CausalLM.own_parameters`.

        Matrices are [n, d], norms and biases [d].
        """


@dataclass(frozen=True, slots=True)
class LocalWeights(WeightSource):
    """Weights that are tensors of this process, without a copy."""

    named: Sequence[tuple[str, Tensor]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors themselves, [n, d] or [d], which the trainer's next update changes; see `WeightSource`."""
        return iter(self.named)
