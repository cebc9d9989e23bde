"""Loads the models of one process: weights that never change are in memory once, however many read them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from palestra.config import BUILT_IN, AdapterConfig, VisionTraining
from palestra.errors import ConfigError, ModelError
from palestra.models.adapter_files import SavedAdapter, base_of, saved_adapter
from palestra.models.adapters import Adapter
from palestra.models.catalog import cache_folder, model_folder
from palestra.models.causal_lm import CausalLM, load_causal_lm, load_tokenizer
from palestra.models.quiet import one_line
from palestra.models.vision.processor import find_layout
from palestra.renderers import PictureTokens
from palestra.types.pictures import Pictures

LoadModel = Callable[[str, torch.dtype, torch.device], tuple[CausalLM, Any]]
_Key = tuple[str, torch.dtype, torch.device]


def load_model(name: str, dtype: torch.dtype, device: torch.device) -> tuple[CausalLM, Any]:
    """Load the weights and the tokenizer of a model; an adapter's folder is merged into its base.

    Args:
        dtype: of weights with two dimensions or more.
    """
    return load_causal_lm(name, dtype, device), load_tokenizer(name)


def picture_tokens(name: str, tokenizer: Any, pictures: Pictures) -> PictureTokens | None:
    """Return what writes the placeholders for a model whose weights are in another process; None: it
    reads text only.
    """
    with one_line(f"model {name!r} can't be loaded"):
        layout = find_layout(model_folder(base_of(name)))
    return None if layout is None else PictureTokens(tokenizer, layout, pictures)


class LoadedModels:
    """Models of one process, for its engine and its trainer.

    Each method returns a model that no other caller has, with its tokenizer. Frozen models share weights of the same
    name, precision and device. Unused weights are freed.
    """

    def __init__(self, load: LoadModel = load_model, pictures: Pictures | None = None) -> None:
        """Create an empty registry.

        Args:
            pictures: source of the prompts' pictures for vision-language models; None: none.
        """
        self._read, self._pictures = load, pictures
        self._bases: WeakValueDictionary[_Key, CausalLM] = WeakValueDictionary()
        self._tokenizers: WeakKeyDictionary[CausalLM, Any] = WeakKeyDictionary()
        self._one_at_a_time = threading.Lock()

    def own(
        self, name: str, dtype: torch.dtype, device: torch.device, vision: VisionTraining | None = None
    ) -> tuple[CausalLM, Any]:
        """Load a model with trainable weights of its own.

        Args:
            name: as in `PolicyConfig.model`; an adapter's folder is merged into its base.
            dtype: of weights with two dimensions or more.
            vision: trainable parts of a vision-language model; None: all but what pictures pass through.
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
        """Load a frozen model that computes in the precision of its weights.

        Args:
            name: as in `PolicyConfig.model`; an adapter's folder is its base with that adapter.
            dtype: of weights with two dimensions or more.
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

        Args:
            name: as in `PolicyConfig.model`; an adapter's folder is its base, with that adapter as the start.
            config: must match the adapter to start with.
            seed: for initialising a new float32 adapter of a trainer. None: for an engine, which gets every version's
                weights; they are in the base's precision, without a gradient.
            dtype: of the base's weights with two dimensions or more, and of its products.
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
    for key in ("rank", "alpha", "rslora"):
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
