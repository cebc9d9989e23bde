"""LoRA adapters: policies that share one base model, each with small weights of its own.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1. A flat batch may hold rows of several
policies. The base model is computed for all of them at once; each linear layer that an adapter changes adds
`scale x B A x` to the rows of that adapter's policy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from palestra.errors import ModelError
from palestra.models.causal_lm import CausalLM

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_UNSUPPORTED = ("use_dora", "modules_to_save", "trainable_token_indices", "fan_in_fan_out", "lora_bias")


@dataclass(slots=True)
class Adapter:
    """The weights of one policy. `pairs` has for each linear layer A [rank, in] and B [out, rank]."""

    settings: dict[str, Any]  # PEFT's adapter_config.json
    pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Adapter:
        """Read a folder that PEFT has saved.

        Raises:
            ModelError: files are missing, or it is a kind of adapter that is not supported.
        """
        try:
            settings = json.loads((folder / "adapter_config.json").read_text())
            weights = load_file(folder / "adapter_model.safetensors")
        except (OSError, ValueError) as error:
            raise ModelError(f"the adapter in {folder} can't be read: {error}") from error
        if settings.get("peft_type") != "LORA" or settings.get("bias", "none") != "none":
            raise ModelError(f"the adapter in {folder} is not a plain LoRA without biases")
        if found := [name for name in _UNSUPPORTED if settings.get(name)]:
            raise ModelError(f"the adapter in {folder} uses {found[0]}, which is not supported")
        adapter = cls(settings)
        adapter.replace(weights.items())
        return adapter

    def replace(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, under PEFT's names; all or none of them.

        Raises:
            ModelError: a name that is not one of LoRA's, or half of a pair.
        """
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            ending = next((end for end in (_A, _B) if name.endswith(end)), None)
            if ending is None:
                raise ModelError(f"{name!r} is not a LoRA weight")
            layer = name.removeprefix(_PREFIX).removesuffix(ending)
            halves.setdefault(layer, {})[ending] = tensor
        if lonely := [layer for layer, found in halves.items() if len(found) < 2]:
            raise ModelError(f"the adapter has only one of A and B for {lonely[0]!r}")
        self.pairs = {layer: (found[_A], found[_B]) for layer, found in halves.items()}

    def scale(self, layer: str, rank: int) -> float:
        """`lora_alpha` / rank, or alpha / sqrt(rank) with rank-stabilised LoRA."""
        patterns: dict[str, float] = self.settings.get("alpha_pattern") or {}
        named = next((value for key, value in patterns.items() if layer == key or layer.endswith("." + key)), None)
        alpha = float(named if named is not None else self.settings["lora_alpha"])
        return alpha / math.sqrt(rank) if self.settings.get("use_rslora") else alpha / rank


class Adapters:
    """The adapters of an engine, applied to the rows of their policies."""

    def __init__(self, model: CausalLM) -> None:
        self._layers = {name: module for name, module in model.model.named_modules() if isinstance(module, nn.Linear)}
        self._head = model.model.get_output_embeddings()
        self._weights: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}  # policy, layer: A, and B with the scale
        self._hooked: set[str] = set()
        self._rows: list[tuple[str, Tensor]] = []  # of the pass that is running

    def set(self, policy: str, adapter: Adapter) -> None:
        """Give a policy an adapter, or other weights of it.

        Raises:
            ModelError: it does not fit the model.
        """
        prepared = {}
        for layer, (a, b) in adapter.pairs.items():
            module = self._layers.get(layer)
            if module is None or module is self._head:
                raise ModelError(f"the adapter of {policy!r} changes {layer!r}, which is no inner linear layer")
            if (a.shape[1], b.shape[0]) != (module.in_features, module.out_features) or a.shape[0] != b.shape[1]:
                raise ModelError(f"the adapter of {policy!r} has the wrong shape for {layer!r}")
            like = module.weight
            prepared[layer] = (a.to(like), (b.float() * adapter.scale(layer, a.shape[0])).to(like))
        for layer in prepared.keys() - self._hooked:
            self._layers[layer].register_forward_hook(self._hook(layer))
            self._hooked.add(layer)
        self._weights[policy] = prepared

    @contextmanager
    def applied(self, policies: Sequence[str]) -> Iterator[None]:
        """While this lasts, row i of the flat batch is of policy `policies[i]`; further rows have no adapter."""
        with_adapter = sorted(self._weights.keys() & set(policies)) if self._weights else []
        self._rows = [(p, torch.tensor([i for i, q in enumerate(policies) if q == p])) for p in with_adapter]
        try:
            yield
        finally:
            self._rows = []

    def _hook(self, layer: str) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            changed = None
            for policy, rows in self._rows:
                pair = self._weights[policy].get(layer)
                if pair is not None:
                    changed = output.clone() if changed is None else changed
                    x = inputs[0][0, rows.to(output.device)]
                    changed[0].index_add_(0, rows.to(output.device), (x @ pair[0].T) @ pair[1].T)
            return changed

        return add
