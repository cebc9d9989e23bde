"""LoRA: matrices of low rank beside linear layers whose own weights never change (Hu et al. 2021, "LoRA").

A layer of weights W computes W x + scale B A x, with A [r, in] and B [out, r]. B is zero at first, so that a new
adapter changes nothing. Only A and B have gradients and moments of an optimizer, and only they are published and saved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.config import AdapterConfig
from palestra.errors import ConfigError, ModelError

_A, _B = "lora_A", "lora_B"


class LoraLinear(nn.Module):
    """A linear layer with a product of low rank beside it.

    Attributes:
        weight, bias: those of the layer, which it shares with every other model on the same base.
        lora_A, lora_B: linear layers without bias, of weights [r, in] and [out, r].
        scale: factor of their product.
    """

    def __init__(self, layer: nn.Linear, config: AdapterConfig) -> None:
        """Stand in for a layer; the new weights are float32, and not filled yet.

        Args:
            layer: keeps its weights.
            config: rank and scale.
        """
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = config.scale
        out, width = layer.weight.shape
        place = layer.weight.device
        self.lora_A, self.lora_B = _unfilled(width, config.rank, place), _unfilled(config.rank, out, place)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out], for [..., in]."""
        # Rounded here, because autocast would round it for each of the two products.
        flat = x.to(self.weight.dtype).flatten(0, -2)
        out = self.add_product(F.linear(flat, self.weight, self.bias), flat)
        return out.view(*x.shape[:-1], -1)

    def add_product(self, out: Tensor, x: Tensor) -> Tensor:
        """Return `out`, [N, out], plus the product of low rank with `x`, [N, in]."""
        # The scale is applied where there are fewest numbers, and the sum is rounded once.
        return torch.addmm(out, F.linear(x, self.lora_A.weight) * self.scale, self.lora_B.weight.t())


def _unfilled(width: int, out: int, device: torch.device) -> nn.Linear:
    """Return a float32 layer without bias whose weights, [out, width], are not filled."""
    layer = nn.Linear(width, out, bias=False, device="meta")  # which draws nothing from the process's generator
    layer.weight = nn.Parameter(torch.empty((out, width), device=device))
    return layer


class Adapter:
    """The matrices of low rank in one model.

    Attributes:
        config: rank, scale and targets.
        base: name of the model that they stand in, as `PolicyConfig.model` has it.
        layers: the layers that have them, by their names in the model of transformers.
        targets: ends of names that stand for these layers and no others.
    """

    def __init__(
        self, model: nn.Module, config: AdapterConfig, base: str, names: Collection[str] | None = None
    ) -> None:
        """Put matrices beside layers of a model; they are not filled yet.

        Args:
            model: of transformers; its layers are replaced in place, and their weights are not touched.
            config: rank, scale and targets.
            base: name of the model.
            names: layers that get them; None: those that `config` names.

        Raises:
            ConfigError: the model has no such layer, or one is too narrow.
        """
        linear = linear_layers(model)
        chosen = target_layers(linear, config) if names is None else names
        if unknown := [name for name in chosen if name not in linear]:
            raise ConfigError(f"the adapter is for a layer {unknown[0]}, and the model {base!r} has none of this name")
        self.config, self.base = config, base
        self.layers: dict[str, LoraLinear] = {}
        for name in [name for name in linear if name in frozenset(chosen)]:
            _check_rank(name, linear[name], config.rank)
            self.layers[name] = LoraLinear(linear[name], config)
            model.set_submodule(name, self.layers[name])
        self.targets = _short_names(self.layers, linear)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return each matrix with its name in the model of transformers, always in the same order."""
        return [
            (f"{name}.{key}.weight", getattr(layer, key).weight)
            for name, layer in self.layers.items()
            for key in (_A, _B)
        ]

    def fill(self, seed: int) -> None:
        """Draw A uniformly as PEFT does (He et al. 2015, with a = sqrt(5)), and set B to zero.

        Args:
            seed: of the draw, which is made on the CPU, so that it is the same for every device.
        """
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in self.layers.values():
                drawn = torch.empty(layer.lora_A.weight.shape)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=draw)
                layer.lora_A.weight.copy_(drawn)
                layer.lora_B.weight.zero_()

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy matrices, [r, in] and [out, r], by the names of `named_parameters`.

        Raises:
            ModelError: one is missing, or has another shape.
        """
        for name, parameter in self.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise ModelError(f"the adapter has no matrix {name} of shape {tuple(parameter.shape)}")
            with torch.no_grad():
                parameter.copy_(weights[name])

    def freeze(self, dtype: torch.dtype) -> None:
        """Round the matrices, which have no gradient from here on: for an engine, or a policy that is never trained."""
        for _, parameter in self.named_parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model of transformers by name, without the head that predicts tokens."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def target_layers(linear: Mapping[str, nn.Linear], config: AdapterConfig) -> list[str]:
    """Return the names of the layers that an adapter is for.

    Args:
        linear: the model's linear layers.
        config: its `targets` are all, or endings of names.

    Raises:
        ConfigError: a target is no layer's.
    """
    if config.targets == "all-linear":
        if not linear:
            raise ConfigError("the model has no linear layer that an adapter could stand beside")
        return list(linear)
    for target in config.targets:
        if not any(_ends(name, target) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(f"adapter.targets names {target!r}, which is none of the model's layers: {known}")
    return [name for name in linear if any(_ends(name, target) for target in config.targets)]


def merge(model: nn.Module, weights: Mapping[str, Tensor], scale: float) -> None:
    """Add the products of an adapter to a model's own weights, which are float32.

    Args:
        model: of transformers.
        weights: matrices [r, in] and [out, r], by the names of `Adapter.named_parameters`.
        scale: factor of the products.

    Raises:
        ModelError: the model has no such layer, or one of another shape.
    """
    linear = linear_layers(model)
    ending = f".{_A}.weight"
    for name in (key.removesuffix(ending) for key in weights if key.endswith(ending)):
        a, b = weights[f"{name}{ending}"], weights[f"{name}.{_B}.weight"]
        if name not in linear or linear[name].weight.shape != (len(b), a.shape[1]):
            raise ModelError(f"the model has no layer {name} of shape {(len(b), a.shape[1])}, which the adapter is for")
        with torch.no_grad():
            linear[name].weight += scale * (b.float() @ a.float()).to(linear[name].weight)


def _short_names(layers: Collection[str], linear: Collection[str]) -> list[str]:
    """Return the last parts of the names of layers, or all of them if other linear layers have the same last part."""
    last = sorted({name.rpartition(".")[2] for name in layers})
    same = {name for name in linear if name.rpartition(".")[2] in last}
    return last if same == set(layers) else list(layers)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_rank(name: str, layer: nn.Linear, rank: int) -> None:
    """Raise ConfigError if a product of this rank could be any change of the layer, so that it is none of low rank."""
    out, width = layer.weight.shape
    if rank > min(out, width):
        raise ConfigError(
            f"adapter.rank is {rank}, and the layer {name} has {width} inputs and {out} outputs; a rank is at most the "
            f"smaller of the two, {min(out, width)}"
        )
