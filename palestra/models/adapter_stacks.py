"""The matrices of several adapters, stacked layer by layer, for products of rows with all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.models.adapters import Adapter, LoraEmbedding, LoraLinear

Runs = Sequence[tuple[Adapter | None, int]]
Layer = TypeVar("Layer", LoraLinear, LoraEmbedding)


class RowGroups:
    """The rows of a pass, grouped by adapter.

    Attributes:
        adapters: each once, those given first in front; None: the base alone.
        sizes: number of rows of each.
        order: int64 [N], sorts the rows by adapter; None: they are sorted.
        back: int64 [N], the inverse of `order`.
    """

    def __init__(self, runs: Runs, device: torch.device, first: Sequence[Adapter] = ()) -> None:
        """Group rows. `runs` are (adapter, number of rows) in order; the adapters `first` come first, even without
        rows.
        """
        places: dict[int, list[int]] = {id(adapter): [] for adapter in first}
        by_id: dict[int, Adapter | None] = {id(adapter): adapter for adapter in first}
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
        """Return each adapter's linear layer of a name; None where it has none."""
        return [None if adapter is None else adapter.layers.get(name) for adapter in self.adapters]

    def embeddings(self, name: str) -> list[LoraEmbedding | None]:
        """Return each adapter's token embedding of a name; None where it has none."""
        return [None if adapter is None else adapter.embedding.get(name) for adapter in self.adapters]

    def sorted(self, rows: Tensor) -> Tensor:
        """Return rows [N, d] sorted by adapter."""
        return rows if self.order is None else rows.index_select(0, self.order)

    def restored(self, rows: Tensor) -> Tensor:
        """Return rows [N, d] in the order of the pass, given those sorted by adapter."""
        return rows if self.order is None else rows.index_select(0, self.back)


def separately(
    rows: RowGroups, layers: Sequence[Layer | None], least: int, add: Callable[..., Tensor], out: Tensor, *given: Tensor
) -> Tensor:
    """Return numbers [N, k] to which each adapter's layer added something in its own rows.

    Layers are those of the adapters in `rows`; None leaves rows unchanged. A call has at least `least` rows: fewer are
    computed twice. `add` gets a layer, and rows of `out` and `given`.
    """
    pieces = []
    parts = (torch.split(rows.sorted(part), rows.sizes) for part in (out, *given))
    for layer, *own in zip(layers, *parts, strict=True):
        count, lacking = len(own[0]), least - len(own[0])
        if lacking > 0 and layer is not None:
            own = [torch.cat((part, part[:1].expand(lacking, *part.shape[1:]))) for part in own]
        pieces.append(own[0] if layer is None else add(layer, *own)[:count])
    return rows.restored(torch.cat(pieces))


ALIGNED = 8  # numbers: rows of stacked matrices begin at multiples of 16 bytes, which a grouped product needs
KEPT_PASSES = 32  # for so many passes the matrices of an adapter without rows stay with the others


class Stacks:
    """The stacked matrices of several adapters, by layer.

    Passes without a gradient reuse them, even while some adapters have no rows: a batch of replies changes by one row
    at a time, and stacking takes as long as a pass.
    """

    def __init__(self) -> None:
        self.adapters: list[Adapter] = []
        self._used: dict[int, int] = {}  # by id of an adapter, the newest pass that had rows of it
        self._passes = 0
        self._finite: dict[int, bool] = {}  # by id of an adapter, whether all its numbers are
        self._kept: dict[tuple[Any, ...], Any] = {}

    def hold(self, adapters: Sequence[Adapter | None]) -> bool:
        """Add the adapters of a pass; return whether all stacked numbers are finite."""
        self._passes += 1
        wanted = [adapter for adapter in adapters if adapter is not None]
        missing = [adapter for adapter in wanted if id(adapter) not in self._used]
        self._used |= {id(adapter): self._passes for adapter in wanted}
        recent = [one for one in self.adapters if self._passes - self._used[id(one)] < KEPT_PASSES]
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
        """Drop all stacks if they contain an adapter."""
        if any(adapter is one for one in self.adapters):
            self.adapters, self._used, self._finite, self._kept = [], {}, {}, {}

    def refresh(self, adapter: Adapter) -> None:
        """Update an adapter's matrices in the stacks."""
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

    def up(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return the matrices B of a layer with their scales, [E r, out]; None: no adapter has this layer."""

        def make() -> Tensor | None:
            layers = self._layers(name)
            return stacked(layers, dtype)[1].transpose(1, 2).flatten(0, 1).contiguous() if any(layers) else None

        found: Tensor | None = self._kept_or(("up", name), make)
        return found

    def down(self, names: Sequence[str], dtype: torch.dtype) -> tuple[Tensor, dict[str, tuple[int, int]]]:
        """Return the stacked matrices A of layers, [sum of E r, in], and the first row and r of each."""

        def make() -> tuple[Tensor, dict[str, tuple[int, int]]]:
            pieces, places, start = list[Tensor](), dict[str, tuple[int, int]](), 0
            for name in names:
                if any(layers := self._layers(name)):
                    down = stacked(layers, dtype)[0]
                    places[name] = (start, down.shape[1])
                    pieces.append(down.flatten(0, 1))
                    start += len(pieces[-1])
            return torch.cat(pieces), places

        found: tuple[Tensor, dict[str, tuple[int, int]]] = self._kept_or(("down", *names), make)
        return found

    def _layers(self, name: str) -> list[LoraLinear | None]:
        return [adapter.layers.get(name) for adapter in self.adapters]

    def _kept_or(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the cached value of a key; compute it with `make` the first time."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def stacked(layers: Sequence[LoraLinear | None], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the matrices A of E layers, [E, r, in], and their matrices B with their scales, [E, out, r]. A missing
    layer gets zeros. A trainer's float32 matrices are scaled before they are rounded.
    """
    first = next(layer for layer in layers if layer is not None)
    ranks = [0 if layer is None else len(layer.lora_A.weight) for layer in layers]
    rank = -(-max(ranks) // ALIGNED) * ALIGNED
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
