"""Llama layers on a CPU, computed in fewer and larger steps than transformers' modules.

Such a layer is attention with rotary embedding, then a gated block, each after an RMS norm. A trainer in bfloat16 uses
`AttentionInput` and `BehindAttention`, functions with their own gradients, and an engine with packed matrices uses
whole products without the modules around them, even if rows have adapters. In all other cases, such as a trainer with
adapters, transformers' own layers compute. Without `CpuKernels` both give the bits of transformers' layers.

The functions round where transformers' modules do under autocast; sums may be in another order, because matrices with
the same input are one product, and because of `CpuKernels`. For the backward pass they save the streams and the
products, and recompute rounded weights and norms, which is cheaper than the memory. Autograd would round the same input
once for each product, multiply gradients by matrices one by one, and save a tensor for each operation of a norm and of
a rotary embedding, and for each of their gradients; most of a layer's time between products is spent on these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers.activations import SiLUActivation

from palestra.models.attention_backend import AttentionSlot
from palestra.models.output_head import is_called_as_it_is
from palestra_cpu.cpu_kernels import CpuKernels, cpu_kernels
from palestra_cpu.kernel_arguments import CachedRows, DecodingLayer
from palestra_cpu.packed import PackedLinear, packed_part
from palestra_cpu.torch_operators import TorchOperators, swapped

_ROUNDED = torch.bfloat16
_Backward = Callable[..., tuple[Tensor | None, ...]]


class _Context(FunctionCtx):
    """Values that the forward pass saves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    heads: tuple[int, int]
    eps: float


def between_products() -> CpuKernels | TorchOperators:
    """Return what computes norms, rotation and gates on this machine."""
    return cpu_kernels() or TorchOperators()


def _in_own_precision(backward: _Backward) -> _Backward:
    """Compute a backward pass without autocast, so that a caller's autocast does not change how it rounds."""

    @functools.wraps(backward)
    def compute(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False):
            return backward(ctx, *gradients)

    return compute


class AttentionInput(Function):
    """Rotated queries and keys, and values: `apply(x, norm, eps, cos, sin, heads, weights, biases...)`."""

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        *parts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries bfloat16 [1, H, N, D], keys and values [1, K, N, D].

        Args:
            x: float32 [N, hidden], the residual stream.
            norm: float32 [hidden], weights of the norm.
            cos: float32 [N, 1, D].
            sin: float32 [N, 1, D], its first half negative.
            heads: H, of queries, and K, of keys.
            parts: float32 weights [out, hidden] of queries, keys and values, then their biases [out] or None.
        """
        weights, biases = ([part for part in found if part is not None] for found in (parts[:3], parts[3:]))
        between = between_products()
        y, factors = between.norm(x, None, norm, eps)
        whole = F.linear(y, _below(weights), torch.cat(biases).to(_ROUNDED) if biases else None)
        ctx.save_for_backward(x, norm, factors, cos, sin, *weights)
        ctx.heads, ctx.eps = heads, eps
        return between.rotate(whole, cos, sin, heads)

    @staticmethod
    @_in_own_precision
    @once_differentiable
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the stream [N, hidden], the norm, the weights [n, d] and the biases."""
        x, norm, factors, cos, sin, *weights = ctx.saved_tensors
        between = between_products()
        given = torch.cat([one[0].transpose(0, 1) for one in gradients], dim=1)
        of_whole = _beside(between.rotate(given.flatten(1), cos, swapped(sin), ctx.heads))
        of_x, of_norm = between.norm_gradient(of_whole @ _below(weights), x, factors, norm, None)
        sizes = [count * cos.shape[-1] for count in (*ctx.heads, ctx.heads[1])]
        needs = ctx.needs_input_grad[6:]
        of_weights: Sequence[Tensor | None] = (None,) * 3
        of_biases: Sequence[Tensor | None] = (None,) * len(needs[3:])
        if any(needs[:3]):
            of_weights = _weight_gradients(of_whole, between.norm(x, None, norm, ctx.eps)[0], sizes)
        if any(needs[3:]):
            of_biases = torch.split(of_whole.sum(dim=0, dtype=torch.float32), sizes)
        return of_x, of_norm, None, None, None, None, *of_weights, *of_biases


class BehindAttention(Function):
    """The stream after a layer: with z = x + out(seen) and y the norm of z, z + down(silu(gate(y)) * up(y)).

    Called as `apply(x, seen, norm, eps, out, gate, up, down)`.
    """

    @staticmethod
    def forward(ctx: _Context, x: Tensor, seen: Tensor, norm: Tensor, eps: float, *matrices: Tensor) -> Tensor:
        """Return float32 [N, hidden].

        Args:
            x: float32 [N, hidden], the residual stream.
            seen: bfloat16 [N, H * D], the attention output.
            norm: float32 [hidden], weights of the norm.
            matrices: float32, out [hidden, H * D], gate and up [inner, hidden], and down [hidden, inner].
        """
        out, gate, up, down = matrices
        between, stream = between_products(), x.clone()
        y, factors = between.norm(stream, F.linear(seen, out.to(_ROUNDED)), norm, eps)
        both = F.linear(y, _below([gate, up]))
        ctx.save_for_backward(stream, seen, norm, factors, both, out, gate, up, down)
        ctx.eps = eps
        return stream + F.linear(between.gate(both), down.to(_ROUNDED))

    @staticmethod
    @_in_own_precision
    @once_differentiable
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the stream, the attention output, the norm and the weights [n, d]."""
        stream, seen, norm, factors, both, out, *weights, down = ctx.saved_tensors
        between, given = between_products(), gradients[0].to(_ROUNDED)
        active, of_both = between.gate_gradient(both, given @ down.to(_ROUNDED))
        of_stream, of_norm = between.norm_gradient(of_both @ _below(weights), stream, factors, norm, gradients[0])
        of_added = of_stream.to(_ROUNDED)
        of_matrices: Sequence[Tensor | None] = (None,) * 4
        if any(ctx.needs_input_grad[4:]):
            y = between.norm(stream, None, norm, ctx.eps)[0]
            of_matrices = [
                *_weight_gradients(of_added, seen, [len(out)]),
                *_weight_gradients(of_both, y, [len(weight) for weight in weights]),
                *_weight_gradients(given, active, [len(down)]),
            ]
        return of_stream, of_added @ out.to(_ROUNDED), of_norm, None, *of_matrices


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """Return the results of `rotate` as the concatenated products, [N, out], without copying."""
    first = parts[0]
    return first.as_strided((first.shape[2], first.stride(2)), (first.stride(2), 1))


def _below(weights: Sequence[Tensor]) -> Tensor:
    """Return matrices [out, in] below one another, rounded."""
    whole = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]), dtype=_ROUNDED)
    for part, weight in zip(torch.split(whole, [len(w) for w in weights]), weights, strict=True):
        part.copy_(weight)
    return whole


def _weight_gradients(of_out: Tensor, given: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the gradients of matrices that read the same input, float32 [out, in] each."""
    return [part.float() for part in torch.split(of_out.t() @ given, list(sizes))]


# How far a token sees in layers of each class. Apart from that, these classes differ only in their biases.
_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda attention: None,
    "MistralDecoderLayer": lambda attention: getattr(attention.config, "sliding_window", None),
    "Qwen2DecoderLayer": lambda attention: attention.sliding_window,
}
_NORMS = frozenset(name.replace("DecoderLayer", "RMSNorm") for name in _WINDOWS)


def shorten_layers(model: nn.Module) -> None:
    """Replace the forward of Llama layers of a transformers model on a CPU; other layers are unchanged.

    Matrices replaced later are looked up at each call.
    """
    for layer in model.modules():
        if type(layer).__name__ in _WINDOWS and _is_plain(layer):
            layer.forward = MethodType(_forward, layer)


def _is_plain(layer: Any) -> bool:
    """Return whether a layer has the supported activation and biases."""
    biased = (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    return isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation) and all(one.bias is None for one in biased)


def _forward(
    layer: Any, hidden_states: Tensor, *arguments: Any, position_embeddings: tuple[Tensor, Tensor], **named: Any
) -> Tensor:
    """Return the residual stream [1, N, hidden] after a layer; replaces the layer's own `forward`."""
    slot: AttentionSlot = layer.self_attn.palestra_slot
    alone = slot.attention is not None and not slot.shared_out and len(hidden_states) == 1
    if alone and hidden_states.dtype == torch.float32:
        if _is_packed(layer):
            found = _decoded(layer, hidden_states, slot, position_embeddings)
            return _sampled(layer, hidden_states, slot, position_embeddings) if found is None else found
        if _is_rounded(layer):
            return _rounded(layer, hidden_states, slot, position_embeddings)
    computed: Tensor = type(layer).forward(
        layer, hidden_states, *arguments, position_embeddings=position_embeddings, **named
    )
    return computed


def _is_rounded(layer: Any) -> bool:
    """Return whether a layer has its original modules without hooks or adapters, and multiplies in bfloat16."""
    norms, matrices = (layer.input_layernorm, layer.post_attention_layernorm), _projections(layer)
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and all(type(one) is nn.Linear for one in matrices)
        and all(type(one).__name__ in _NORMS and one.weight.dtype == torch.float32 for one in norms)
        and all(is_called_as_it_is(one) for one in (*matrices, *norms, layer.self_attn, layer.mlp, layer.mlp.act_fn))
        and _is_plain(layer)
    )


def _projections(layer: Any) -> tuple[Any, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    first = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    return *first, mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _is_packed(layer: Any) -> bool:
    """Return whether queries, keys and values share one packed matrix, gate and up another, the rest their own."""
    query, key, value, out, gate, up, down = (packed_part(one) for one in _projections(layer))
    if not (query and key and value and out and gate and up and down):
        return False
    return query.matrix is key.matrix is value.matrix and gate.matrix is up.matrix


def _rounded(layer: Any, stream: Tensor, slot: AttentionSlot, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return a layer's output, [1, N, hidden], by functions with our own gradients."""
    attention, mlp, before, behind = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
    x, first = stream[0], (attention.q_proj, attention.k_proj, attention.v_proj)
    cos, sin = _signed(slot, rotation)
    queries, keys, values = AttentionInput.apply(  # type: ignore[no-untyped-call]
        x,
        before.weight,
        before.variance_epsilon,
        cos,
        sin,
        _heads(attention),
        *(one.weight for one in first),
        *(one.bias for one in first),
    )
    seen = _attended(layer, slot, queries, keys, values)
    matrices = attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    found: Tensor = BehindAttention.apply(  # type: ignore[no-untyped-call]
        x, seen, behind.weight, behind.variance_epsilon, *(one.weight for one in matrices)
    )
    return found.unsqueeze(0)


def _decoded(layer: Any, stream: Tensor, slot: AttentionSlot, rotation: tuple[Tensor, Tensor]) -> Tensor | None:
    """Return a layer's output, [1, N, hidden], by one call; None: it needs several."""
    kernels, attention, mlp = between_products(), layer.self_attn, layer.mlp
    rows = getattr(slot.attention, "compiled", None)
    if not isinstance(rows, CachedRows) or not isinstance(kernels, CpuKernels):
        return None
    if len(rows) != stream.shape[1] or len(rows) > kernels.most_rows or rows.addresses is None:
        return None
    parts = attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj
    matrices = [one.matrix.address for one in parts if type(one) is PackedLinear]
    found = [one for one in matrices if one is not None]
    if len(found) < len(parts):
        return None
    what = DecodingLayer(
        number=attention.layer_idx,
        heads=_heads(attention),
        scale=attention.scaling,
        window=_WINDOWS[type(layer).__name__](attention),
    )
    norms = [(one.weight, one.variance_epsilon) for one in (layer.input_layernorm, layer.post_attention_layernorm)]
    x = stream[0].clone()
    kernels.layer(x, found, norms, _signed(slot, rotation), what, rows)
    return x.unsqueeze(0)


def _sampled(layer: Any, stream: Tensor, slot: AttentionSlot, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return a layer's output, [1, N, hidden], with packed matrices and without a gradient."""
    attention, mlp, before, behind = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
    first, between = (attention.q_proj, attention.k_proj, attention.v_proj), between_products()
    x = stream[0].clone()  # to which both products are added
    whole = _product(first, between.norm(x, None, before.weight, before.variance_epsilon)[0])
    found = _attended(layer, slot, *between.rotate(whole, *_signed(slot, rotation), _heads(attention)))
    seen = _product([attention.o_proj], found)
    both = _product([mlp.gate_proj, mlp.up_proj], between.norm(x, seen, behind.weight, behind.variance_epsilon)[0])
    return x.add_(_product([mlp.down_proj], between.gate(both))).unsqueeze(0)


def _product(layers: Sequence[Any], x: Tensor) -> Tensor:
    """Return the output of all layers of one packed matrix for x [N, in]: bfloat16 [N, out]."""
    found: Tensor = layers[0].whole_product(layers, x)
    return found


def _attended(layer: Any, slot: AttentionSlot, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention output, [N, H * D]."""
    assert slot.attention is not None
    attention = layer.self_attn
    window = _WINDOWS[type(layer).__name__](attention)
    return slot.attention(attention.layer_idx, queries, keys, values, attention.scaling, window).flatten(1)


def _heads(attention: Any) -> tuple[int, int]:
    """Return how many heads queries and keys have."""
    queries, keys = (one.out_features // attention.head_dim for one in (attention.q_proj, attention.k_proj))
    return queries, keys


def _signed(slot: AttentionSlot, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [N, 1, D], the first half of the sines negative, once for all layers of a pass."""
    if slot.rotation is None or slot.rotation[0] is not rotation:
        cos, sin = (each[0].unsqueeze(1) for each in rotation)
        low, high = sin.chunk(2, dim=-1)
        slot.rotation = rotation, cos, torch.cat((-low, high), dim=-1)
    return slot.rotation[1:]
