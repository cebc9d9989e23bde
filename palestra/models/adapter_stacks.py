"""The matrices of several adapters, stacked layer by layer, for products of rows with all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.models.adapters import Adapter, LoraLinear

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
    """Return the matrices A of E layers, [E, r, in], and their matrices B with their scales, [E, out, r].

    Args:
        layers: of one name; None: zeros in place of a missing layer.
        dtype: of the result. A trainer's float32 matrices are scaled before they are rounded.
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
