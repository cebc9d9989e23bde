"""Rows of several adapters in one pass over their base (Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA").

The products with the base's weights are those of all rows together. The products of low rank are grouped: the matrices
of all adapters in the pass are stacked, padded with zeros to the largest rank, and each row meets those of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.models.adapters import Adapter, LoraLinear, linear_layers
from palestra.models.causal_lm import AttentionBackend, CausalLM

MIN_ROWS = 4  # products of fewer rows take another way through the processor, and round differently
Runs = Sequence[tuple[Adapter | None, int]]

# A product of few rows with the matrices of all adapters costs less than a call for each of them (docs/adapters.md).
_FEW_ROWS = 128
_KEPT_PASSES = 32  # for so many passes the matrices of an adapter without rows stay with the others
_ALIGNED = 8  # numbers: rows of stacked matrices begin at multiples of 16 bytes, which a grouped product needs


class MixedModel:
    """A model on the weights of a base, through which rows of any adapters on it pass together.

    Attributes:
        model: what computes; it has no adapter of its own.
        base: the model whose weights these are.
    """

    def __init__(self, base: CausalLM, exact: bool = False) -> None:
        """Make another model on a base's weights.

        Args:
            base: without an adapter; no pass of it may be running.
            exact: whether the numbers of a row must be the same bit for bit with any rows beside it in its pass, as far
                as the base's own products keep that: each adapter's rows are then multiplied by themselves.
        """
        self.base, self._exact = base, exact
        self.model = base.on_same_weights()
        self._now = _Pass()
        linear = linear_layers(self.model.model)
        self._aligned = all(size % _ALIGNED == 0 for layer in linear.values() for size in layer.weight.shape)
        for name, layer in linear.items():
            self.model.model.set_submodule(name, _MixedLinear(name, layer, self._now))
        self._stacks = Stacks()

    def hidden(self, ids: Tensor, positions: Tensor, attention: AttentionBackend, runs: Runs) -> Tensor:
        """Return the last layer's normalised output, float32 [N, hidden]; see `CausalLM.hidden`.

        Args:
            ids: [N] token ids.
            positions: [N], the position of each token within its sequence.
            attention: knows which tokens see each other.
            runs: how many of the rows, in order, have which adapter, N in all; None: the base alone.
        """
        self._now.add = self._way(runs, ids.device)
        try:
            return self.model.hidden(ids, positions, attention)
        finally:
            self._now.clear()

    def refresh(self, adapter: Adapter) -> None:
        """Take over an adapter's new weights into what is kept of them."""
        self._stacks.refresh(adapter)

    def forget(self, adapter: Adapter) -> None:
        """Drop what is kept of an adapter's matrices, which are not needed any more."""
        self._stacks.forget(adapter)

    def _way(self, runs: Runs, device: torch.device) -> _Add | None:
        """Return what adds the products of low rank in a pass; None: no row has an adapter."""
        rows = RowGroups(runs, device)
        if not any(rows.adapters):
            return None
        if len(rows.adapters) == 1:  # the numbers of a policy that has a pass for itself never depend on passes before
            return _One(rows)
        if self._exact:
            return _Separate(rows, MIN_ROWS)
        dtype, known = self.model.compute_dtype, bool(self._now.readers)  # not in the first pass
        few = known and not torch.is_grad_enabled() and len(rows) <= _FEW_ROWS
        # A matrix that is not finite would spoil rows of other adapters where all are multiplied together.
        if few and self._stacks.hold(rows.adapters):
            return _Dense(rows, self._stacks, dtype, self._now)
        grouped = self._aligned and (device.type == "cpu" or dtype == torch.bfloat16)
        return _Grouped(rows, dtype) if grouped else _Separate(rows, 1)


class RowGroups:
    """The rows of a pass by their adapters.

    Attributes:
        adapters: those in the pass, each once; None: the base alone.
        sizes: how many rows each has.
        order: int64 [N], which puts the rows of an adapter one after another; None: they lie so.
        back: int64 [N], the inverse of `order`.
    """

    def __init__(self, runs: Runs, device: torch.device) -> None:
        """Sort rows.

        Args:
            runs: how many of the rows, in order, have which adapter.
            device: of `order` and `back`.
        """
        places: dict[int, list[int]] = {}
        by_id: dict[int, Adapter | None] = {}
        start = 0
        for adapter, count in runs:
            by_id[id(adapter)] = adapter
            places.setdefault(id(adapter), []).extend(range(start, start + count))
            start += count
        self.adapters = list(by_id.values())
        self.sizes = [len(places[key]) for key in by_id]
        flat = [place for key in by_id for place in places[key]]
        self.order: Tensor | None = None
        if flat != list(range(start)):
            self.order = torch.tensor(flat, device=device)
            self.back = self.order.argsort()
        self.device, self._start = device, start

    def __len__(self) -> int:
        return self._start

    def layers(self, name: str) -> list[LoraLinear | None]:
        """Return the layer of each adapter of a name; None: it has none there."""
        return [None if adapter is None else adapter.layers.get(name) for adapter in self.adapters]

    def sorted(self, rows: Tensor) -> Tensor:
        """Return rows [N, d] by adapter."""
        return rows if self.order is None else rows.index_select(0, self.order)

    def restored(self, rows: Tensor) -> Tensor:
        """Return rows [N, d] that lie by adapter in the order of the pass."""
        return rows if self.order is None else rows.index_select(0, self.back)


class Stacks:
    """The matrices of several adapters, layer by layer, one behind another.

    They are kept between passes without gradient, also while some of their adapters have no rows: a batch of replies
    changes by one row at a time, and stacking takes as long as a pass.
    """

    def __init__(self) -> None:
        self.adapters: list[Adapter] = []
        self._used: dict[int, int] = {}  # by id of an adapter, the newest pass that had rows of it
        self._passes = 0
        self._finite: dict[int, bool] = {}  # by id of an adapter, whether all its numbers are
        self._kept: dict[tuple[Any, ...], Any] = {}

    def hold(self, adapters: Sequence[Adapter | None]) -> bool:
        """Make room for the adapters of a pass; returns whether all numbers that are kept are finite."""
        self._passes += 1
        wanted = [adapter for adapter in adapters if adapter is not None]
        missing = [adapter for adapter in wanted if id(adapter) not in self._used]
        self._used |= {id(adapter): self._passes for adapter in wanted}
        recent = [one for one in self.adapters if self._passes - self._used[id(one)] < _KEPT_PASSES]
        if missing or 2 * len(recent) <= len(self.adapters):
            self.adapters, self._kept = [*recent, *missing], {}
            self._used = {id(one): self._used[id(one)] for one in self.adapters}
            self._finite = {}
        for adapter in self.adapters:
            if id(adapter) not in self._finite:
                sums = [parameter.detach().sum(dtype=torch.float32) for _, parameter in adapter.named_parameters()]
                self._finite[id(adapter)] = bool(torch.stack(sums).isfinite().all())
        return all(self._finite[id(adapter)] for adapter in self.adapters)

    def forget(self, adapter: Adapter) -> None:
        """Drop everything if an adapter is in it."""
        if any(adapter is one for one in self.adapters):
            self.adapters, self._used, self._finite, self._kept = [], {}, {}, {}

    def refresh(self, adapter: Adapter) -> None:
        """Write an adapter's new matrices over its old ones."""
        if id(adapter) not in self._used:
            return
        slot = next(number for number, one in enumerate(self.adapters) if one is adapter)
        self._finite.pop(id(adapter), None)
        for (kind, *names), found in self._kept.items():
            layers = [layer for name in names if (layer := adapter.layers.get(name)) is not None]
            if kind == "up" and layers:
                start = slot * (len(found) // len(self.adapters))
                up = layers[0].lora_B.weight.t() * layers[0].scale
                found[start : start + len(up)] = up
            elif kind == "down":
                down, places = found
                for name, (first, rank) in places.items():
                    if (layer := adapter.layers.get(name)) is not None:
                        start = first + slot * rank
                        down[start : start + len(layer.lora_A.weight)] = layer.lora_A.weight

    def kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what was made under a key, and make it the first time."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
        return found


def stacked(layers: Sequence[LoraLinear | None], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the matrices A of layers, [E, r, in], and their matrices B with their scales, [E, out, r].

    Args:
        layers: E of one name, at least one of which is there; zeros stand for the others.
        dtype: of the result; matrices of a trainer are float32, and are scaled before they are rounded.
    """
    first = next(layer for layer in layers if layer is not None)
    ranks = [0 if layer is None else len(layer.lora_A.weight) for layer in layers]
    rank = -(-max(ranks) // _ALIGNED) * _ALIGNED
    (out, width), own = first.weight.shape, first.lora_A.weight
    down, up, scales = list[Tensor](), list[Tensor](), list[float]()
    for layer, r in zip(layers, ranks, strict=True):
        a = own.new_zeros((0, width)) if layer is None else layer.lora_A.weight
        b = own.new_zeros((out, 0)) if layer is None else layer.lora_B.weight
        down.append(F.pad(a, (0, 0, 0, rank - r)) if r < rank else a)
        up.append(F.pad(b, (0, rank - r)) if r < rank else b)
        scales.append(0.0 if layer is None else layer.scale)
    factors = torch.tensor(scales, dtype=torch.float32, device=own.device).view(-1, 1, 1)
    return torch.stack(down).to(dtype), (torch.stack(up) * factors).to(dtype)


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
        """Keep rows, of which a product gets at least so many; some are multiplied twice if there are fewer."""
        self._rows, self._least = rows, least

    def __call__(self, name: str, out: Tensor, x: Tensor) -> Tensor:
        """Return `out` [N, out] plus the products with `x` [N, in]; see `_Add`."""
        rows = self._rows
        layers = rows.layers(name)
        if not any(layers):
            return out
        pieces = []
        parts = (torch.split(rows.sorted(matrix), rows.sizes) for matrix in (out, x))
        for layer, base, own in zip(layers, *parts, strict=True):
            count, lacking = len(own), self._least - len(own)
            if layer is None:
                pieces.append(base)
            elif lacking > 0:
                more = [torch.cat((part, part[:1].expand(lacking, -1))) for part in (base, own)]
                pieces.append(layer.add_product(*more)[:count])
            else:
                pieces.append(layer.add_product(base, own))
        return rows.restored(torch.cat(pieces))


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


class _Dense:
    """One product with all matrices A, of which each row keeps those of its adapter, and one with all matrices B.

    Layers that read the same input, such as queries, keys and values, have their matrices A in one product.
    """

    def __init__(self, rows: RowGroups, stacks: Stacks, dtype: torch.dtype, now: _Pass) -> None:
        """Keep the rows of a pass; `now` says which layers read the same input."""
        self._rows, self._stacks, self._dtype, self._now = rows, stacks, dtype, now
        slots = {id(adapter): slot for slot, adapter in enumerate(stacks.adapters)}
        numbers = [slots.get(id(adapter), -1) for adapter in rows.adapters]
        of_row = [number for number, size in zip(numbers, rows.sizes, strict=True) for _ in range(size)]
        self._of_row = rows.restored(torch.tensor(of_row, device=rows.device).unsqueeze(1))
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._low: dict[str, Tensor] = {}

    def __call__(self, name: str, out: Tensor, x: Tensor) -> Tensor:
        """Return `out` [N, out], changed in place, plus the products with `x` [N, in]; see `_Add`."""
        up = self._stacks.kept(("up", name), lambda: self._up(name))
        if up is False:
            return out
        if name not in self._low:
            names = self._now.readers[self._now.leader]
            down, places = self._stacks.kept(("down", *names), lambda: self._down(names))
            ranks = [rank for _, rank in places.values()]
            low = F.linear(x, down).masked_fill_(self._masked(tuple(ranks)), 0.0)
            widths = [rank * len(self._stacks.adapters) for rank in ranks]
            self._low = dict(zip(places, torch.split(low, widths, dim=1), strict=True))
        return out.addmm_(self._low[name], up)

    def _layers(self, name: str) -> list[LoraLinear | None]:
        return [adapter.layers.get(name) for adapter in self._stacks.adapters]

    def _up(self, name: str) -> Tensor | bool:
        """Return the matrices B of a layer, [E r, out]; False: no adapter has this layer."""
        layers = self._layers(name)
        if not any(layers):
            return False
        return stacked(layers, self._dtype)[1].transpose(1, 2).flatten(0, 1).contiguous()

    def _down(self, names: Sequence[str]) -> tuple[Tensor, dict[str, tuple[int, int]]]:
        """Return the matrices A of layers that adapters have, [sum of E r, in], and for each its first row and r."""
        pieces, places, start = list[Tensor](), dict[str, tuple[int, int]](), 0
        for name in names:
            if any(layers := self._layers(name)):
                down = stacked(layers, self._dtype)[0]
                places[name] = (start, down.shape[1])
                pieces.append(down.flatten(0, 1))
                start += len(pieces[-1])
        return torch.cat(pieces), places

    def _masked(self, ranks: tuple[int, ...]) -> Tensor:
        """Return which numbers of low rank are none of a row's adapter, bool [N, sum of E r]."""
        found = self._masks.get(ranks)
        if found is None:
            slots = torch.arange(len(self._stacks.adapters), device=self._rows.device)
            found = self._masks[ranks] = self._of_row != torch.cat([slots.repeat_interleave(rank) for rank in ranks])
        return found


_Add = _One | _Separate | _Grouped | _Dense


class _Pass:
    """The pass that is running: what adds the products of low rank, and the input that was rounded last.

    Attributes:
        add: None: no row of the pass has an adapter.
        readers: for each layer that reads another input than the layer before, it and those after it that read the
            same; known after the first pass.
        leader: the first layer that reads the input that was rounded last.
    """

    add: _Add | None = None
    leader: str = ""
    _given: Tensor | None = None
    _flat: Tensor | None = None

    def __init__(self) -> None:
        self.readers: dict[str, list[str]] = {}

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
        self.add = self._given = self._flat = None


class _MixedLinear(nn.Module):
    """A linear layer of a base, with the products of low rank of a pass beside it."""

    def __init__(self, name: str, layer: nn.Linear, now: _Pass) -> None:
        """Share the weights of the layer of a name; `now` is of the model."""
        super().__init__()
        self._name, self._now = name, now
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out], for [..., in]."""
        flat = self._now.flat(self._name, x, self.weight.dtype)
        out = F.linear(flat, self.weight, self.bias)
        if self._now.add is not None:
            out = self._now.add(self._name, out, flat)
        return out.view(*x.shape[:-1], -1)
