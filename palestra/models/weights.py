"""The weights of a policy on their way from a trainer to `Engine.sync_weights`.

Trainer and engine do not know each other. A source stands between them, and says how the tensors travel: as they are,
where both are in one process, or by a folder. This module loads no torch, because the fake trainer and the fake engine
run without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(Protocol):
    """The weights of one version of a policy, for an engine to read.

    A source is valid until the trainer takes its next optimizer step: an engine copies what it needs before
    `sync_weights` returns.
    """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight once, as (name, tensor), under the names of `CausalLM.own_parameters`.

        Tensors have the shapes of the parameters: matrices [n, d], norms and biases [d].
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalWeights:
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


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights in the files of a folder, in Hugging Face's layout or, of an adapter, in PEFT's.

    Attributes:
        folder: has `model*.safetensors`, or the files of an adapter.
    """

    folder: Path

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, [n, d] or [d], of one file after another; see `WeightSource`."""
        from safetensors.torch import load_file

        from palestra.models.adapter_files import adapter_folder, read_adapter

        if adapter_folder(str(self.folder)) is not None:
            yield from read_adapter(self.folder).weights.items()
        for path in sorted(self.folder.glob("model*.safetensors")):
            yield from load_file(path).items()
