"""Rows of several adapters in one pass over their base (Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA").

All rows share the products with the base's weights. The low-rank products are grouped: the matrices of all adapters in
the pass are stacked, padded with zeros to the largest rank, and each row is multiplied with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.models.adapter_stacks import ALIGNED, RowGroups, Runs, Stacks, separately, stacked
from palestra.models.adapters import Adapter, LoraEmbedding, LoraLinear, embedding_layer, head_layer, linear_layers
from palestra.models.attention_backend import AttentionBackend
from palestra.models.causal_lm import CausalLM
from palestra.models.kernels import PackedLayer, kernels

MIN_ROWS = 4  # products of fewer rows take another way through the processor, and round differently

# A product of few rows with the matrices of all adapters costs less than a call for each of them.
_FEW_ROWS = 128
_PADDED = 2  # a product of equally many rows of each adapter may have so many times as many as there are


class MixedModel:
    """A model on a base's weights that computes rows of any of its adapters in one pass.

    Attributes:
        model: has no adapter of its own.
    """

    def __init__(self, base: CausalLM, exact: bool = False, sampling: bool = False) -> None:
        """Create a model on a base's weights.

        The base has no adapter and no running pass. `exact`: a row's numbers are the same bit for bit in any batch, as
        far as the base's own products allow, so each adapter's rows are multiplied separately. `sampling`: gradients
        are never needed, so kernels may pack the base's matrices; not those of an exact model, because
        `check_determinism` tests products of plain matrices.
        """
        self.base, self._exact = base, exact
        self.model = base.on_same_weights()
        self._least = MIN_ROWS if exact else 1
        self._now = _Pass(self._least)
        linear, head = linear_layers(self.model.model), head_layer(self.model.model)
        self._aligned, self._head_aligned = _are_aligned(linear), _are_aligned(head)
        packed = kernels().pack_base(self.model) if sampling and not exact else {}
        for name, layer in (linear | head).items():
            self.model.model.set_submodule(name, _MixedLinear(name, layer, self._now, packed.get(name)))
        for name, embedding in embedding_layer(self.model.model).items():
            # Before the hook of `CausalLM` that rounds embeddings: the sum is rounded once.
            embedding.register_forward_hook(_MixedEmbedding(name, self._now), prepend=True)
        self._stacks = Stacks()

    def hidden(self, ids: Tensor, positions: Tensor, attention: AttentionBackend, runs: Runs) -> Tensor:
        """Return the last layer's normalised output, float32 [N, hidden]; see `CausalLM.hidden`. `runs` are (adapter,
        number of rows) in order, N rows in all; None: the base alone.
        """
        rows = RowGroups(runs, ids.device)
        self._now.begin(rows, self._way(rows, runs, self._aligned))
        try:
            return self.model.hidden(ids, positions, attention)
        finally:
            self._now.clear()

    def logits(self, hidden: Tensor, runs: Runs) -> Tensor:
        """Return the logits, float32 [M, V], of hidden states [M, hidden]; see `CausalLM.logits`. `runs` are (adapter,
        number of rows) in order, M rows in all; None: the base alone.
        """
        if not any(adapter is not None and adapter.on_head for adapter, _ in runs):
            return self.model.logits(hidden)
        rows = RowGroups(runs, hidden.device)
        self._now.begin(rows, self._way(rows, runs, self._head_aligned))
        try:
            return self.model.logits(hidden)
        finally:
            self._now.clear()

    def refresh(self, adapter: Adapter) -> None:
        """Update cached copies of an adapter's matrices."""
        self._stacks.refresh(adapter)

    def forget(self, adapter: Adapter) -> None:
        """Drop cached copies of an adapter's matrices."""
        self._stacks.forget(adapter)

    def _way(self, rows: RowGroups, runs: Runs, aligned: bool) -> _Add | None:
        """Return what adds the low-rank products of linear layers in a pass; None: no row has an adapter."""
        if not any(rows.adapters):
            return None
        if len(rows.adapters) == 1:  # the numbers of a policy that has a pass for itself never depend on passes before
            return _One(rows)
        if self._exact:
            return _Separate(rows, self._least)
        device = rows.device
        dtype, known = self.model.compute_dtype, bool(self._now.readers)  # not in the first pass
        grouped = aligned and (device.type == "cpu" or dtype == torch.bfloat16)
        if known and not torch.is_grad_enabled():
            finite = self._stacks.hold(rows.adapters)
            # A matrix that is not finite would spoil rows of other adapters where all are multiplied together.
            if finite and len(rows) <= _FEW_ROWS:
                return _Dense(rows, self._stacks, dtype, self._now)
            if grouped:
                return _KeptGroups(RowGroups(runs, device, self._stacks.adapters), self._stacks, dtype, self._now)
        return _Grouped(rows, dtype) if grouped else _Separate(rows, 1)


class _One:
    """All rows have one adapter: its layers compute as they do in a model of its own."""

    def __init__(self, rows: RowGroups) -> None:
        self._rows = rows

    def __call__(self, name: str, out: Tensor, x: Tensor) -> Tensor:
        """Return `out` [N, out] plus the product with `x` [N, in]; see `_Add`."""
        (layer,) = self._rows.layers(name)
        return out if layer is None else layer.add_product(out, x)


class _Separate:
    """The rows of each adapter are multiplied by themselves, as in a pass of their own."""

    def __init__(self, rows: RowGroups, least: int) -> None:
        """Keep the rows; a product gets at least `least` of them, so that fewer rows are multiplied twice."""
        self._rows, self._least = rows, least

    def __call__(self, name: str, out: Tensor, x: Tensor) -> Tensor:
        """Return `out` [N, out] plus the products with `x` [N, in]; see `_Add`."""
        layers = self._rows.layers(name)
        if not any(layers):
            return out
        return separately(self._rows, layers, self._least, LoraLinear.add_product, out, x)


class _Grouped:
    """One grouped product with all matrices A, and one with all matrices B."""

    def __init__(self, rows: RowGroups, dtype: torch.dtype) -> None:
        self._rows, self._dtype = rows, dtype
        sizes = torch.tensor(rows.sizes, dtype=torch.int32, device=rows.device)
        self._ends = sizes.cumsum(0, dtype=torch.int32)

    def __call__(self, name: str, out: Tensor, x: Tensor) -> Tensor:
        """Return `out` [N, out] plus the products with `x` [N, in]; see `_Add`."""
        layers = self._rows.layers(name)
        if not any(layers):
            return out
        down, up = stacked(layers, self._dtype)
        low = F.grouped_mm(self._rows.sorted(x), down.transpose(1, 2), offs=self._ends)
        return out + self._rows.restored(F.grouped_mm(low, up.transpose(1, 2), offs=self._ends))


class _KeptGroups:
    """The products of `_Grouped`, with matrices cached between passes, including adapters without rows.

    If the adapters have about equally many rows, they are padded to equal numbers and multiplied in one batch: a
    grouped product has a cost per group.
    """

    def __init__(self, rows: RowGroups, stacks: Stacks, dtype: torch.dtype, now: _Pass) -> None:
        """Keep rows in the order of the stacks' adapters; `now` knows which layers read the same input."""
        self._stacks, self._dtype, self._now = stacks, dtype, now
        self._number = len(stacks.adapters)
        sizes = rows.sizes[: self._number]
        count, most = sum(sizes), max(sizes)  # rows of the base alone are the last
        order = torch.arange(len(rows), device=rows.device) if rows.order is None else rows.order
        self._own = order[:count]
        self._ends: Tensor | None = None
        if self._number * most > _PADDED * count:
            self._ends = torch.tensor(sizes, dtype=torch.int32, device=rows.device).cumsum(0, dtype=torch.int32)
            self._read, places = self._own, torch.arange(count, device=rows.device)
        else:
            padded = [slot * most + number for slot, size in enumerate(sizes) for number in range(size)]
            places = torch.tensor(padded, device=rows.device)
            self._read = self._own.new_zeros(self._number * most)  # any row may stand where there is none
            self._read[places] = self._own
        self._all = count == len(rows)
        # Which product belongs to each row: of those with an adapter, or of all in the order of the pass.
        self._places = places[order.argsort()] if self._all else places
        self._leader, self._x = "", torch.empty(0)

    def __call__(self, name: str, out: Tensor, x: Tensor) -> Tensor:
        """Return `out` [N, out], changed in place, plus the products with `x` [N, in]; see `_Add`."""
        up = self._stacks.up(name, self._dtype)
        if up is None:
            return out
        if self._leader != self._now.leader:
            self._leader, self._x = self._now.leader, x.index_select(0, self._read)
        down, places = self._stacks.down(self._now.readers[self._leader], self._dtype)
        (start, rank), number = places[name], self._number
        first = down[start : start + number * rank].view(number, rank, -1).transpose(1, 2)
        second = up.view(number, rank, -1)
        if self._ends is not None:
            low = F.grouped_mm(self._x, first, offs=self._ends)
            added = F.grouped_mm(low, second, offs=self._ends)
        else:
            low = torch.bmm(self._x.view(number, -1, x.shape[1]), first)
            added = torch.bmm(low, second).flatten(0, 1)
        added = added.index_select(0, self._places)
        return out.add_(added) if self._all else out.index_add_(0, self._own, added)


class _Dense:
    """One product with all matrices A, masked to each row's adapter, and one with all matrices B.

    Layers that read the same input, such as queries, keys and values, share the first product.
    """

    def __init__(self, rows: RowGroups, stacks: Stacks, dtype: torch.dtype, now: _Pass) -> None:
        """Keep the rows of a pass; `now` knows which layers read the same input."""
        self._rows, self._stacks, self._dtype, self._now = rows, stacks, dtype, now
        slots = {id(adapter): slot for slot, adapter in enumerate(stacks.adapters)}
        numbers = [slots.get(id(adapter), -1) for adapter in rows.adapters]
        of_row = [number for number, size in zip(numbers, rows.sizes, strict=True) for _ in range(size)]
        self._of_row = rows.restored(torch.tensor(of_row, device=rows.device).unsqueeze(1))
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._low: dict[str, Tensor] = {}

    def __call__(self, name: str, out: Tensor, x: Tensor) -> Tensor:
        """Return `out` [N, out], changed in place, plus the products with `x` [N, in]; see `_Add`."""
        up = self._stacks.up(name, self._dtype)
        if up is None:
            return out
        if name not in self._low:
            down, places = self._stacks.down(self._now.readers[self._now.leader], self._dtype)
            ranks = [rank for _, rank in places.values()]
            low = F.linear(x, down).masked_fill_(self._masked(tuple(ranks)), 0.0)
            widths = [rank * len(self._stacks.adapters) for rank in ranks]
            self._low = dict(zip(places, torch.split(low, widths, dim=1), strict=True))
        return out.addmm_(self._low[name], up)

    def _masked(self, ranks: tuple[int, ...]) -> Tensor:
        """Return which low-rank numbers belong to other adapters than a row's own, bool [N, sum of E r]."""
        found = self._masks.get(ranks)
        if found is None:
            slots = torch.arange(len(self._stacks.adapters), device=self._rows.device)
            found = self._masks[ranks] = self._of_row != torch.cat([slots.repeat_interleave(rank) for rank in ranks])
        return found


_Add = _One | _Separate | _Grouped | _KeptGroups | _Dense


class _Pass:
    """The running pass: its low-rank products, and the input that was rounded last.

    Attributes:
        add: for linear layers; None: no row has an adapter.
        rows: None: no pass is running.
        least: minimum number of rows in a product, where each adapter's rows are multiplied separately.
        readers: groups of consecutive layers that read the same input; known after the first pass.
        leader: the first layer that reads the input rounded last.
    """

    add: _Add | None = None
    rows: RowGroups | None = None
    leader: str = ""
    _given: Tensor | None = None
    _flat: Tensor | None = None

    def __init__(self, least: int) -> None:
        self.least = least
        self.readers: dict[str, list[str]] = {}

    def begin(self, rows: RowGroups, add: _Add | None) -> None:
        """Begin a pass with its rows and their low-rank products."""
        self.rows, self.add = rows, add

    def flat(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of a layer, [..., in], as [N, in] in the precision of products: once for all its readers."""
        if x is not self._given or self._flat is None:
            self._given, self._flat, self.leader = x, x.to(dtype).flatten(0, -2), name
            self.readers.setdefault(name, [name])
        elif name not in self.readers[self.leader]:
            self.readers[self.leader] = [*self.readers[self.leader], name]
        return self._flat

    def clear(self) -> None:
        """Forget the pass."""
        self.rows = self.add = self._given = self._flat = None


class _MixedLinear(nn.Module):
    """A linear layer of a base, with the low-rank products of a pass.

    Attributes:
        packed: the same layer as a packed matrix; None: not packed.
    """

    def __init__(self, name: str, layer: nn.Linear, now: _Pass, packed: PackedLayer | None) -> None:
        """Share the weights of a named layer; `now` is the model's running pass."""
        super().__init__()
        self._name, self._now, self.packed = name, now, packed
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out], for [..., in]."""
        flat = self._now.flat(self._name, x, self.weight.dtype)
        out = F.linear(flat, self.weight, self.bias) if self.packed is None else self.packed(flat)
        if self._now.add is not None:
            out = self._now.add(self._name, out, flat)
        return out.view(*x.shape[:-1], -1)

    def whole_product(self, layers: Sequence[_MixedLinear], x: Tensor) -> Tensor:
        """Return the outputs of all layers of a packed matrix for x [N, in], with the low-rank products: [N, out]."""
        assert self.packed is not None
        flat = self._now.flat(self._name, x, self.weight.dtype)
        whole = self.packed.whole_product(layers, flat)
        if self._now.add is None:
            return whole
        parts = torch.split(whole, [layer.out_features for layer in layers], dim=-1)
        for layer, part in zip(layers, parts, strict=True):
            self._now.flat(layer._name, x, self.weight.dtype)  # which notes that it reads the same
            found = self._now.add(layer._name, part, flat)
            if found.data_ptr() != part.data_ptr():
                part.copy_(found)
        return whole

    def products_at(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the products of low rank with `x`, [M, in], at some outputs, [M, K]; see `LoraLinear.products_at`."""
        none = torch.zeros(tokens.shape, dtype=torch.float32, device=x.device)
        if self._now.rows is None or not any(layers := self._now.rows.layers(self._name)):
            return none
        return separately(self._now.rows, layers, self._now.least, _add_at, none, x, tokens)


def _add_at(layer: LoraLinear, out: Tensor, x: Tensor, tokens: Tensor) -> Tensor:
    """Return `out`, [M, K], plus the products of a layer; see `LoraLinear.products_at`."""
    return out + layer.products_at(x, tokens)


class _MixedEmbedding:
    """Adds a pass's low-rank products to an embedding's output, separately for each adapter."""

    def __init__(self, name: str, now: _Pass) -> None:
        """Attach to a named embedding; `now` is the model's running pass."""
        self._name, self._now = name, now

    def __call__(self, _layer: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        """Return embeddings, [..., d], with the products for token ids, [...]."""
        if self._now.rows is None or not any(layers := self._now.rows.embeddings(self._name)):
            return out
        add, flat = LoraEmbedding.add_product, out.flatten(0, -2)
        return separately(self._now.rows, layers, self._now.least, add, flat, inputs[0].flatten()).view(out.shape)


def _are_aligned(layers: dict[str, nn.Linear]) -> bool:
    return all(size % ALIGNED == 0 for layer in layers.values() for size in layer.weight.shape)
