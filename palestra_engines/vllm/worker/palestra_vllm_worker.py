"""Weight transfer from a trainer to vLLM's workers: the only module that depends on vLLM's internals.

vLLM's interpreter imports this file from a folder that otherwise only has the module shared with the trainer
(`palestra_weight_group`), so it imports no other module of Palestra. There are two transfers: a safetensors file, whose
path is in the HTTP request, and broadcasts in a process group with the trainer as rank 0. vLLM's own transfers need
CUDA.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
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
from vllm.config import set_current_vllm_config
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

BACKEND = "palestra_file"
log = logging.getLogger("vllm.palestra")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: a file needs no connection."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The new weights.

    Attributes:
        path: of a safetensors file with all weights, under the names of the model's own files.
    """

    path: str


class FileTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Replaces the weights of a paused engine by a file's, or by others between start and end."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No effect: there is no connection."""

    def start_weight_update(self) -> None:
        """Prepare the layers for loading; until `finish_weight_update` no forward pass may run."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all weights of a mapped file."""
        self.load(_tensors(update_info.path))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all weights; if some are missing, leave a model that can compute and be loaded again. Weights are [n, d]
        or [d], with the names of the model's own files.
        """
        try:
            self.model.load_weights(weights)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """End an incomplete update: each layer has its new weights, or its old ones."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():  # it has a part of its weights, which the next update would take for its own
                info.load_numel, info.loaded_weights = 0, []
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Process the new weights as after the first loading."""
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """Pack a head tied to the embedding again: no file has it, and a reload on a CPU leaves its old copy."""
        config = getattr(self.model.config, "text_config", self.model.config)  # of a model that sees
        if not config.tie_word_embeddings:
            return
        named = {name.rpartition(".")[2]: module for name, module in self.model.named_modules()}
        head, embedding = named.get("lm_head"), named.get("embed_tokens")
        if head is not None and embedding is not None:
            head.weight = embedding.weight
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        """No effect: there is no connection."""


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, [n, d] or [d], of a safetensors file, with their names."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - an object of Rust, over which one can't iterate
            yield name, file.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


class WorkerExtension:
    """Methods that `--worker-extension-cls` adds to vLLM's workers, for broadcasts.

    Each takes JSON, because vLLM's route only passes strings, and returns an error text; "": success. They never raise:
    vLLM reads the answers of several workers up to the first error, and would mistake the others for answers to its
    next call.
    """

    palestra_group: WeightGroup | None = None

    def palestra_join(self: Any, place: str) -> str:
        """Join a group, replacing the previous one, or only try to reach the trainer.

        `place` has `host` and `port` of the trainer's store, `seconds` as timeout of the rendezvous and of one
        broadcast; and for a group `name`, `backend`, `first_rank` of this server's workers, and `size`.
        """

        def join(host: str, port: int, seconds: float, name: str = "", **group: Any) -> None:
            if self._weight_update_active:  # of a trainer that was killed before it had vLLM finish
                with set_current_vllm_config(self.vllm_config):
                    self.weight_transfer_engine.abandon()
                self._weight_update_active = False
            address = own_address(host, port, seconds)
            if name:
                self.palestra_leave()
                store = reach_store(host, port, seconds)
                rank = group["first_rank"] + self.parallel_config.rank
                backend, size = group["backend"], group["size"]
                self.palestra_group = WeightGroup(store, name, backend, rank, size, address, seconds)

        return _problem(lambda: join(**json.loads(place)))

    def palestra_receive(self: Any, layout: str) -> str:
        """Load all weights that the trainer broadcasts, as they arrive; vLLM must finish the update then. `layout` is
        the JSON of the `WeightLayout` to expect.
        """

        def receive() -> None:
            if self.palestra_group is None:
                raise RuntimeError("this worker is in no group over which weights could come")
            self.start_weight_update()
            try:
                with set_current_vllm_config(self.vllm_config):
                    self.weight_transfer_engine.load(self.palestra_group.receive(WeightLayout(**json.loads(layout))))
                    torch.accelerator.synchronize()
            except BaseException:
                self._weight_update_active = False
                self.palestra_leave()  # after a broadcast that has failed the ranks do not agree any more
                raise

        return _problem(receive)

    def palestra_leave(self) -> None:
        """Leave the group."""
        if self.palestra_group is not None:
            self.palestra_group.close()
            self.palestra_group = None


def _problem(work: Callable[[], None]) -> str:
    """Run a function; return its error in one line, after logging it in vLLM's log; "": success."""
    try:
        work()
    except Exception as error:
        log.exception("a call of Palestra's trainer has failed")
        return " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return ""
