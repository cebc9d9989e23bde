"""Let vLLM's workers get new weights from a trainer: the only module of Palestra that knows vLLM from inside.

vLLM's interpreter imports this file by itself, from a folder with nothing else in it than what it shares with the
trainer (`palestra_weight_group`), so it imports no other module of Palestra. There are two ways: a file, whose path
alone the HTTP request carries, and broadcasts of a process group in which the trainer is rank 0. vLLM's own ways of
updating weights need CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from palestra_weight_group import (  # type: ignore[import-not-found]
    WeightGroup,
    WeightLayout,
    own_address,
    reach_store,
)
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


class _Transfer(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Replaces the weights of a paused engine."""

    def start_weight_update(self) -> None:
        """Make the layers ready to be loaded again; until `finish_weight_update` no forward pass may run."""
        initialize_layerwise_reload(self.model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all weights; where they do not all come, leave a model that can be loaded again.

        Args:
            weights: [n, d] or [d], with the names of the model's own files.
        """
        try:
            self.model.load_weights(weights)
        except BaseException:
            # A layer that has a part of its weights would take the next update's first ones for the rest of them.
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    info.load_numel, info.loaded_weights = 0, []
            finalize_layerwise_reload(self.model, self.model_config)  # layers without weights get their old ones back
            raise

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


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: a file needs no connection."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the new weights are.

    Attributes:
        path: of a safetensors file with all weights, under the names of the model's own files.
    """

    path: str


class FileTransfer(_Transfer):
    """Reads new weights from a file in shared memory, or in a folder that both sides see."""

    init_info_cls, update_info_cls = FileInitInfo, FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing: there is no connection."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load all weights of a file, mapped into memory."""
        self.load(_tensors(update_info.path))

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, [n, d] or [d], of a safetensors file, with their names."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - an object of Rust, over which one can't iterate
            yield name, file.get_tensor(name)


@dataclass
class GroupInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the trainer's process listens, and which group the workers of this server join there.

    Attributes:
        host: address of the store by which the ranks of groups find one another.
        port: of the store.
        seconds: how long the meeting, or one broadcast, may take.
        group: name of the group; "": none is joined yet, and the workers say whether they reach the store.
        backend: `gloo` or `nccl`.
        first_rank: of this server's workers.
        size: number of ranks.
    """

    host: str
    port: int
    seconds: float
    group: str = ""
    backend: str = "gloo"
    first_rank: int = 1
    size: int = 0


@dataclass
class GroupUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which weights are going to come, see `WeightLayout`.

    Attributes:
        names: of the weights, which are those of the model's own files.
        shapes: of each weight.
        dtype: name of their precision.
        bucket_bytes: most bytes of a bucket.
    """

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    bucket_bytes: int


class GroupTransfer(_Transfer):
    """Receives new weights as broadcasts of a process group."""

    init_info_cls, update_info_cls = GroupInitInfo, GroupUpdateInfo
    group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Join a group, in the place of the one before.

        Raises:
            ConnectionError: the trainer can't be reached.
            RuntimeError: the other ranks do not come in time.
        """
        address = own_address(init_info.host, init_info.port, init_info.seconds)
        if not init_info.group:
            return
        self.shutdown()
        parallel = self.parallel_config
        self.group = WeightGroup(
            reach_store(init_info.host, init_info.port, init_info.seconds),
            init_info.group,
            init_info.backend,
            init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            init_info.size,
            address,
            init_info.seconds,
        )

    def receive_weights(self, update_info: GroupUpdateInfo) -> None:
        """Load all weights that the trainer broadcasts, while further ones come.

        Raises:
            RuntimeError: the trainer is gone, or a bucket did not come in time.
        """
        if self.group is None:
            raise RuntimeError("this worker is in no group over which weights could come")
        layout = WeightLayout(
            names=update_info.names,
            shapes=update_info.shapes,
            dtype=update_info.dtype,
            bucket_bytes=update_info.bucket_bytes,
        )
        try:
            self.load(self.group.receive(layout))
        except BaseException:
            self.shutdown()  # after a broadcast that has failed the ranks do not agree any more
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.close()
            self.group = None


WeightTransferEngineFactory.register_engine("palestra_file", FileTransfer)
WeightTransferEngineFactory.register_engine("palestra_group", GroupTransfer)


class WorkerExtension:
    """Adds nothing: naming this class in `--worker-extension-cls` makes every worker import the module."""
