"""Loads the models of one process: weights that never change are in memory once, however many read them.

Such a model may be larger than one rank's memory: it is created on torch's meta device, sharded, and then filled. Its
flat forward pass is checked after that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from palestra.config import BUILT_IN, AdapterConfig, VisionTraining
from palestra.errors import ConfigError, ModelError
from palestra.models.adapter_files import SavedAdapter, adapter_folder, base_of, saved_adapter
from palestra.models.adapters import Adapter
from palestra.models.catalog import cache_folder, exact_model, model_folder
from palestra.models.causal_lm import FLAT_ATTENTION, CausalLM, load_causal_lm, load_tokenizer
from palestra.models.quiet import NO_CODE, as_model_error, quiet_transformers
from palestra.models.vision.processor import find_layout, has_vision
from palestra.renderers import PictureTokens
from palestra.types.messages import Pictures

LoadModel = Callable[[str, torch.dtype, torch.device], tuple[CausalLM, Any]]
_Key = tuple[str, torch.dtype, torch.device]


def load_model(name: str, dtype: torch.dtype, device: torch.device) -> tuple[CausalLM, Any]:
    """Load the weights and the tokenizer of a model; an adapter's folder is merged into its base. `dtype` is that of
    weights with two dimensions or more.
    """
    return load_causal_lm(name, dtype, device), load_tokenizer(name)


def picture_tokens(name: str, tokenizer: Any, pictures: Pictures) -> PictureTokens | None:
    """Return what writes the placeholders for a model whose weights are in another process; None: it
    reads text only.
    """
    with as_model_error(f"model {name!r} can't be loaded"):
        layout = find_layout(model_folder(base_of(name)))
    return None if layout is None else PictureTokens(tokenizer, layout, pictures)


class LoadedModels:
    """Models of one process, for its engine and its trainer.

    Each method returns a model that no other caller has, with its tokenizer. Frozen models share weights of the same
    name, precision and device. Unused weights are freed.
    """

    def __init__(self, load: LoadModel = load_model, pictures: Pictures | None = None) -> None:
        """Create an empty registry. `pictures` are those of prompts, for vision-language models."""
        self._read, self._pictures = load, pictures
        self._bases: WeakValueDictionary[_Key, CausalLM] = WeakValueDictionary()
        self._tokenizers: WeakKeyDictionary[CausalLM, Any] = WeakKeyDictionary()
        self._one_at_a_time = threading.Lock()

    def own(
        self, name: str, dtype: torch.dtype, device: torch.device, vision: VisionTraining | None = None
    ) -> tuple[CausalLM, Any]:
        """Load a model with trainable weights of its own. `name` is as in `PolicyConfig.model`; an adapter's folder is
        merged into its base. Without `vision` all is trained but what pictures pass through.
        """
        model, tokenizer = self._load(name, dtype, device)
        if model.vision is not None:
            model.vision.trained = vision == "trained"
            for weight_name, weight in model.named_parameters():
                if model.vision.owns(weight_name):
                    weight.requires_grad_(model.vision.trained)
        elif vision is not None:
            raise ConfigError(f"vision is {vision!r}, and {name} reads text only; leave `vision` out")
        return model, tokenizer

    def frozen(self, name: str, dtype: torch.dtype, device: torch.device) -> tuple[CausalLM, Any]:
        """Load a frozen model that computes in the precision of its weights. `name` is as in `PolicyConfig.model`; an
        adapter's folder is its base with that adapter.
        """
        saved = saved_adapter(name)
        model, tokenizer = self._on_base(name if saved is None else saved.base, dtype, device)
        if saved is None:
            return model, tokenizer
        adapter = model.add_adapter(saved.config, saved.base, saved.layers)
        adapter.take(saved.weights)
        adapter.freeze(dtype)
        return model, tokenizer

    def adapted(
        self, name: str, config: AdapterConfig, seed: int | None, dtype: torch.dtype, device: torch.device
    ) -> tuple[CausalLM, Any]:
        """Load a model with a trainable adapter on frozen weights.

        `name` is as in `PolicyConfig.model`; an adapter's folder is its base, with that adapter as the start, which
        `config` must match. `seed` initialises a trainer's new float32 adapter; None: for an engine, which gets every
        version's weights, in the base's precision `dtype` and without a gradient.
        """
        saved = saved_adapter(name)
        base = name if saved is None else saved.base
        model, tokenizer = self._on_base(base, dtype, device)
        if model.vision is not None:
            raise ConfigError(f"{name} sees, and adapters of models that see are not supported; leave `adapter` out")
        adapter = model.add_adapter(config, _lasting_name(base))
        if saved is None:
            adapter.fill(seed or 0)
        else:
            _check_same(name, saved, adapter)
            adapter.take(saved.weights)
        if seed is None:
            adapter.freeze(dtype)
        return model, tokenizer

    def _load(self, name: str, dtype: torch.dtype, device: torch.device) -> tuple[CausalLM, Any]:
        """Load a model and its tokenizer, and give a vision-language model its picture source."""
        model, tokenizer = self._read(name, dtype, device)
        if model.vision is not None:
            model.vision.pictures = self._pictures
        return model, tokenizer

    def _on_base(self, name: str, dtype: torch.dtype, device: torch.device) -> tuple[CausalLM, Any]:
        """Return a model on the shared weights of a base, loaded unless they are in memory."""
        with self._one_at_a_time:
            key = (canonical_name(name), dtype, device)
            base = self._bases.get(key)
            if base is None:
                base, tokenizer = self._load(name, dtype, device)
                base.round_to(dtype)
                for parameter in base.model.parameters():
                    parameter.requires_grad_(False)
                self._bases[key], self._tokenizers[base] = base, tokenizer
            return base.on_same_weights(), self._tokenizers[base]


def canonical_name(name: str) -> str:
    """Return the same text for all names of one model."""
    with contextlib.suppress(ModelError):
        found = model_folder(name)
        return str(found.resolve()) if isinstance(found, Path) else found
    return name


def _lasting_name(name: str) -> str:
    """Return a base's name to store with its adapter, independent of the current directory."""
    if name in BUILT_IN or not Path(name).is_dir():
        return name
    folder = Path(name).resolve()
    made = folder.parent == (cache_folder() / "models").resolve()  # such a folder is made on any machine
    return next((known for known in BUILT_IN if made and folder.name.removeprefix(f"{known}-").isalnum()), str(folder))


def _check_same(name: str, saved: SavedAdapter, adapter: Adapter) -> None:
    """Raise ConfigError unless the adapter to start with matches the configuration."""
    theirs, ours = saved.config, adapter.config
    for key in ("rank", "alpha"):
        if getattr(theirs, key) != getattr(ours, key):
            raise ConfigError(
                f"adapter.{key} is {getattr(ours, key)!r}, and the adapter in {name}, which is to be trained on, has "
                f"{getattr(theirs, key)!r}; take the same"
            )
    if other := set(saved.layers) ^ set(adapter.names):
        raise ConfigError(
            f"adapter.targets names other layers than those of the adapter in {name}, which is to be trained on: they "
            f"differ in {min(other)}"
        )


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
    """
    made = None if adapter_folder(name) is not None else _without_weights(name, dtype)
    return load_model(name, dtype, device) if made is None else (made, load_tokenizer(name))


def _without_weights(name: str, dtype: torch.dtype) -> CausalLM | None:
    """Return a model on the meta device; None: it must be loaded whole."""
    found = model_folder(name)
    folder = found if isinstance(found, Path) else exact_model(name)
    files = PartedFiles(folder)
    with as_model_error(f"model {name!r} can't be loaded"), quiet_transformers():
        config = AutoConfig.from_pretrained(folder, **NO_CODE)
        if has_vision(config) or hasattr(config, "quantization_config"):
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
