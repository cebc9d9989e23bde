"""LoRA: low-rank matrices next to layers whose own weights are frozen (Hu et al. 2021, "LoRA").

A layer with weights W computes W x + scale B A x, with A [r, in] and B [out, r]. B starts at zero, so that a new
adapter changes nothing. Only A and B have gradients and optimizer moments, and only they are published and saved. The
language-model head is such a layer too; for token embeddings see `LoraEmbedding`. Tied head and embedding share W, but
each has its own matrices or none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.config import ALL_LINEAR, AdapterConfig
from palestra.errors import ConfigError, ModelError

LORA_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")  # names of the matrices in the embedding


class LoraEmbedding:
    """A low-rank product next to an embedding: token t has W[t] + scale B A[:, t].

    The matrices are parameters of the embedding itself, and a hook adds the product, so that an embedding that scales
    its output, as Gemma's does, scales the product too.

    Attributes:
        weight: the embedding's, [V, d], shared with all models on the same base.
        lora_embedding_A: [r, V].
        lora_embedding_B: [d, r].
    """

    def __init__(self, layer: nn.Embedding, config: AdapterConfig) -> None:
        """Add float32 matrices to an embedding; they are not initialised yet."""
        (count, width), place = layer.weight.shape, filled_device(layer.weight)
        self.weight = layer.weight
        self.lora_embedding_A = nn.Parameter(torch.empty((config.rank, count), device=place))
        self.lora_embedding_B = nn.Parameter(torch.empty((width, config.rank), device=place))
        self.scale = config.scale * embedding_factor(layer)
        for name, matrix in self.named_parameters():
            layer.register_parameter(name, matrix)
        # Before the hook of `CausalLM` that rounds embeddings: the sum is rounded once.
        layer.register_forward_hook(self._added, prepend=True)

    def add_product(self, out: Tensor, ids: Tensor) -> Tensor:
        """Return `out`, [N, d], plus the low-rank product of `ids`, [N]."""
        low = F.embedding(ids, self.lora_embedding_A.t()).to(self.weight.dtype) * self.scale
        return torch.addmm(out, low, self.lora_embedding_B.t())

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return both matrices by their names in the embedding."""
        return list(zip(LORA_EMBEDDING, (self.lora_embedding_A, self.lora_embedding_B), strict=True))

    def fill(self, draw: torch.Generator) -> None:
        """Set A to zero and draw B from a normal distribution, as PEFT does."""
        with torch.no_grad():
            self.lora_embedding_A.zero_()
            self.lora_embedding_B.copy_(torch.empty(self.lora_embedding_B.shape).normal_(generator=draw))

    def _added(self, _layer: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        """Return embeddings, [..., d], with the product for token ids, [...]."""
        return self.add_product(out.flatten(0, -2), inputs[0].flatten()).view(out.shape)


def filled_device(weight: Tensor) -> torch.device:
    """Return the device for matrices next to a weight, [n, d]: the weight's, or the CPU while it is on
    the meta device.
    """
    return torch.device("cpu") if weight.is_meta else weight.device


def embedding_factor(layer: nn.Embedding) -> float:
    """Return the factor by which an embedding multiplies its weights; 1 for most models."""
    factor = getattr(layer, "embed_scale", 1.0)
    return float(factor.to(layer.weight.dtype) if isinstance(factor, Tensor) else factor)


_A, _B = "lora_A", "lora_B"


class LoraLinear(nn.Module):
    """A linear layer with a low-rank product.

    Attributes:
        weight, bias: the layer's, shared with all models on the same base.
        lora_A, lora_B: linear layers without bias, with weights [r, in] and [out, r].
    """

    def __init__(self, layer: nn.Linear, config: AdapterConfig) -> None:
        """Wrap a layer; the new float32 weights are not initialised yet."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = config.scale
        out, width = layer.weight.shape
        place = filled_device(layer.weight)
        self.lora_A, self.lora_B = _unfilled(width, config.rank, place), _unfilled(config.rank, out, place)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out], for [..., in]."""
        # Rounded here, because autocast would round it for each of the two products.
        flat = x.to(self.weight.dtype).flatten(0, -2)
        out = self.add_product(F.linear(flat, self.weight, self.bias), flat)
        return out.view(*x.shape[:-1], -1)

    def add_product(self, out: Tensor, x: Tensor) -> Tensor:
        """Return `out`, [N, out], plus the low-rank product of `x`, [N, in]."""
        # The scale is applied where there are fewest numbers, and the sum is rounded once.
        return torch.addmm(out, F.linear(x, self.lora_A.weight) * self.scale, self.lora_B.weight.t())

    def products_at(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the low-rank product of `x`, [M, in], at some outputs, int64 [M, K]: float32 [M, K].

        It is rounded as in `add_product`.
        """
        low = F.linear(x, self.lora_A.weight.to(x.dtype)) * self.scale
        return (self.lora_B.weight[tokens].to(x.dtype).float() * low.float().unsqueeze(1)).sum(dim=-1)


def _unfilled(width: int, out: int, device: torch.device) -> nn.Linear:
    """Return a float32 layer without bias whose weights, [out, width], are not initialised."""
    layer = nn.Linear(width, out, bias=False, device="meta")  # which draws nothing from the process's generator
    layer.weight = nn.Parameter(torch.empty((out, width), device=device))
    return layer


class Adapter:
    """The low-rank matrices of one model.

    Attributes:
        base: the model's name, as in `PolicyConfig.model`.
        layers: adapted linear layers, including the head, by their names in the transformers model.
        embedding: the adapted token embedding, by its name; empty if it has no matrices.
        head: name of the language-model head; None: the model has no linear head.
        targets: name suffixes that match exactly the adapted layers.
    """

    def __init__(
        self, model: nn.Module, config: AdapterConfig, base: str, names: Collection[str] | None = None
    ) -> None:
        """Replace layers of a transformers model in place; the matrices are not initialised yet, and the base's weights
        are unchanged. `names` replace the layers that `config` selects.
        """
        linear, head, embedding = linear_layers(model), head_layer(model), embedding_layer(model)
        known: dict[str, nn.Linear | nn.Embedding] = {**linear, **head, **embedding}
        chosen = frozenset(target_layers(linear, known, config) if names is None else names)
        if unknown := sorted(chosen - known.keys()):
            raise ConfigError(f"the adapter is for a layer {unknown[0]}, and the model {base!r} has none of this name")
        for name in [name for name in known if name in chosen]:
            _check_rank(name, known[name], config.rank)
        self.config, self.base = config, base
        self.layers = {name: LoraLinear(layer, config) for name, layer in (linear | head).items() if name in chosen}
        for name, layer in self.layers.items():
            model.set_submodule(name, layer)
        self.embedding = {name: LoraEmbedding(layer, config) for name, layer in embedding.items() if name in chosen}
        self.head = next(iter(head), None)
        self.targets = _short_names(self.names, known)

    @property
    def names(self) -> list[str]:
        """Return the names of all adapted layers."""
        return [*self.layers, *self.embedding]

    @property
    def on_head(self) -> bool:
        """Return whether the language-model head is adapted."""
        return self.head in self.layers

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return each matrix with its name in the transformers model, always in the same order."""
        linear = [
            (f"{name}.{key}.weight", getattr(layer, key).weight)
            for name, layer in self.layers.items()
            for key in (_A, _B)
        ]
        embedding = [(f"{n}.{key}", p) for n, layer in self.embedding.items() for key, p in layer.named_parameters()]
        return [*linear, *embedding]

    def body_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the matrices that affect the last hidden states: all except the head's."""
        return [(name, p) for name, p in self.named_parameters() if not name.startswith(f"{self.head}.")]

    def fill(self, seed: int) -> None:
        """Initialise A uniformly as PEFT does (He et al. 2015, with a = sqrt(5)), and B to zero; see
        `LoraEmbedding.fill` for the embedding.

        Numbers are drawn on the CPU, so that they are the same for every device.
        """
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in self.layers.values():
                drawn = torch.empty(layer.lora_A.weight.shape)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=draw)
                layer.lora_A.weight.copy_(drawn)
                layer.lora_B.weight.zero_()
        for embedding in self.embedding.values():
            embedding.fill(draw)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy matrices, [r, in] and [out, r], by the names of `named_parameters`."""
        for name, parameter in self.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise ModelError(f"the adapter has no matrix {name} of shape {tuple(parameter.shape)}")
            with torch.no_grad():
                parameter.copy_(weights[name])

    def freeze(self, dtype: torch.dtype) -> None:
        """Round the matrices and drop their gradients, for an engine or a frozen policy."""
        for _, parameter in self.named_parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a transformers model by name, except the language-model head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def head_layer(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear language-model head by its name; empty if there is none."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is head}


def embedding_layer(model: nn.Module) -> dict[str, nn.Embedding]:
    """Return the token embedding by its name; empty if there is none."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return {n: one for n, one in model.named_modules() if isinstance(one, nn.Embedding) and one is embedding}


def target_layers(linear: Collection[str], known: Collection[str], config: AdapterConfig) -> list[str]:
    """Return the names of the layers that an adapter's `targets` select. `linear` are the model's linear layers without
    its head.
    """
    targets = [config.targets] if isinstance(config.targets, str) else config.targets
    everything = ALL_LINEAR in targets
    if everything and not linear:
        raise ConfigError("the model has no linear layer that an adapter could stand beside")
    for target in targets:
        if target != ALL_LINEAR and not any(_ends(name, target) for name in known):
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
            raise ConfigError(f"adapter.targets names {target!r}, which is none of the model's layers: {ends}")
    return [n for n in known if (everything and n in linear) or any(_ends(n, target) for target in targets)]


def merge(model: nn.Module, weights: Mapping[str, Tensor], scale: float) -> None:
    """Add the products of an adapter to a model's own float32 weights.

    If the adapter changes a tied head or embedding, the two are untied. Matrices are [r, in] and [out, r], named as by
    `Adapter.named_parameters`.
    """
    head, embedding = head_layer(model), embedding_layer(model)
    known: dict[str, nn.Linear | nn.Embedding] = {**linear_layers(model), **head, **embedding}
    names = list(dict.fromkeys(key.partition(".lora_")[0] for key in weights))
    if any(name in head or name in embedding for name in names):
        _untie(model, [*head.values(), *embedding.values()])
    for name in names:
        ends = LORA_EMBEDDING if name in embedding else (f"{_A}.weight", f"{_B}.weight")
        if any(f"{name}.{end}" not in weights for end in ends):
            raise ModelError(f"the adapter lacks {' or '.join(f'{name}.{end}' for end in ends)}")
        a, b = (weights[f"{name}.{end}"].float() for end in ends)
        product = (b @ a).T if name in embedding else b @ a
        if name not in known or known[name].weight.shape != product.shape:
            raise ModelError(f"the model has no layer {name} of shape {tuple(product.shape)}, which the adapter is for")
        with torch.no_grad():
            known[name].weight += scale * product.to(known[name].weight)


def _untie(model: nn.Module, layers: Sequence[nn.Linear | nn.Embedding]) -> None:
    """Give each of some layers weights of its own, and let the model's configuration say so."""
    kept = set[int]()
    for layer in layers:
        if id(layer.weight) in kept:
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
            model.config.tie_word_embeddings = False  # type: ignore[union-attr]
        kept.add(id(layer.weight))


def _short_names(layers: Collection[str], known: Collection[str]) -> list[str]:
    """Return the last parts of the names of layers, or all of them if other layers have the same last part."""
    last = sorted({name.rpartition(".")[2] for name in layers})
    same = {name for name in known if name.rpartition(".")[2] in last}
    return last if same == set(layers) else list(layers)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_rank(name: str, layer: nn.Linear | nn.Embedding, rank: int) -> None:
    """Raise ConfigError if the rank is so large that the product is not low-rank for this layer."""
    out, width = layer.weight.shape
    if isinstance(layer, nn.Embedding):
        out, width = width, out
    if rank > min(out, width):
        raise ConfigError(
            f"adapter.rank is {rank}, and the layer {name} has {width} inputs and {out} outputs; a rank is at most the "
            f"smaller of the two, {min(out, width)}"
        )
