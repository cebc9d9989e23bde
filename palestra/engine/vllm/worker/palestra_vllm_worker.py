"""Let vLLM's workers read new weights from a file: the only module of Palestra that runs inside of vLLM.

vLLM's interpreter imports this file by itself, from a folder with nothing else in it, so it imports no other module of
Palestra. The file is in the format of safetensors and lies in shared memory, or in a folder that both sides see; the
HTTP request carries its path alone. vLLM's own ways of updating weights need CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "palestra_file"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: a file needs no connection."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the new weights are.

    Attributes:
        path: of a safetensors file with all weights, under the names of the model's own files.
    """

    path: str


class FileTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Replaces the weights of a paused engine by those of a file."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Make the layers ready to be loaded again; until `finish_weight_update` no forward pass may run."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all weights of a file, mapped into memory."""
        self.model.load_weights(_tensors(update_info.path))

    def finish_weight_update(self) -> None:
        """Process the new weights as those of a model that is loaded for the first time."""
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """Give a head that is tied to the embedding the new weights, too.

        On a CPU each linear layer keeps a packed copy of its weight. A tied head is in no file, so a reload leaves its
        old copy, and logits would be those of new layers under an old head.
        """
        config = getattr(self.model.config, "text_config", self.model.config)  # of a model that sees
        if not config.tie_word_embeddings:
            return
        named = {name.rpartition(".")[2]: module for name, module in self.model.named_modules()}
        head, embedding = named.get("lm_head"), named.get("embed_tokens")
        if head is not None and embedding is not None:
            head.weight = embedding.weight
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file, with their names."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - an object of Rust, over which one can't iterate
            yield name, file.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


class WorkerExtension:
    """Adds nothing: naming this class in `--worker-extension-cls` makes every worker import the module."""
