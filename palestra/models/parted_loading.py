"""Models whose weights stay in their files, for a trainer's ranks, each of which reads its own rows.

Such a model may be larger than one rank's memory: it is created on torch's meta device, sharded, and then filled. Its
flat forward pass is checked after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from palestra.errors import ModelError
from palestra.models.adapter_files import adapter_folder
from palestra.models.catalog import exact_model, model_folder
from palestra.models.causal_lm import FLAT_ATTENTION, CausalLM, load_tokenizer
from palestra.models.loading import load_model
from palestra.models.quiet import NO_CODE, one_line, quiet_transformers
from palestra.models.vision.processor import sees


class PartedFiles:
    """The weights in a folder of safetensors files, readable by rows.

    Attributes:
        shapes: of all weights, by name.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers of the files."""
        self._names: dict[Path, list[str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            for path in sorted(folder.glob("model*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    self._names[path] = list(file.keys())
                    self.shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in self._names[path]}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the model in {folder} can't be read: {error}") from error

    def rows(self, wanted: Mapping[str, slice]) -> Iterator[tuple[str, Tensor]]:
        """Yield rows of weights with their names, [n, d] or [d], on the CPU and in the precision of the files."""
        for path, names in self._names.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in wanted.keys() & set(names):
                        yield name, file.get_slice(name)[wanted[name]]
            except (OSError, SafetensorError) as error:
                raise ModelError(f"weights can't be read from {path}: {error}") from error


def load_parted(name: str, dtype: torch.dtype, device: torch.device) -> tuple[CausalLM, Any]:
    """Load a model's tokenizer, and a model whose weights are still in its files; see `CausalLM.unread`.

    Loaded whole are vision-language models, models with an adapter to merge, and models that transformers stores under
    other names than it computes with.

    Args:
        dtype: of weights with two dimensions or more.
        device: for models that are loaded whole.
    """
    made = None if adapter_folder(name) is not None else _without_weights(name, dtype)
    return load_model(name, dtype, device) if made is None else (made, load_tokenizer(name))


def _without_weights(name: str, dtype: torch.dtype) -> CausalLM | None:
    """Return a model on the meta device; None: it must be loaded whole."""
    found = model_folder(name)
    folder = found if isinstance(found, Path) else exact_model(name)
    files = PartedFiles(folder)
    with one_line(f"model {name!r} can't be loaded"), quiet_transformers():
        config = AutoConfig.from_pretrained(folder, **NO_CODE)
        if sees(config) or hasattr(config, "quantization_config"):
            return None
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=FLAT_ATTENTION, **NO_CODE
            )
        model.tie_weights()
        if (folder / "generation_config.json").is_file():  # which is written beside the weights of a checkpoint
            model.generation_config = GenerationConfig.from_pretrained(folder)
    weights = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    if set(model.state_dict()) - set(weights) or not shapes.items() <= files.shapes.items():
        return None
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.data = weight.data.to(dtype)
    return CausalLM(model.eval(), unread=files)
