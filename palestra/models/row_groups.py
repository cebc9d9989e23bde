"""The rows of one pass by their adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from palestra.models.adapters import Adapter, LoraLinear
from palestra.models.lora_embedding import LoraEmbedding

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
        """Group rows.

        Args:
            runs: (adapter, number of rows) in order.
            first: adapters to put first, even without rows.
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

    Args:
        layers: of each adapter in `rows`; None: its rows are unchanged.
        least: minimum number of rows in a call; fewer rows are computed twice.
        add: gets a layer, and rows of `out` and `given`; returns rows like those of `out`.
    """
    pieces = []
    parts = (torch.split(rows.sorted(part), rows.sizes) for part in (out, *given))
    for layer, *own in zip(layers, *parts, strict=True):
        count, lacking = len(own[0]), least - len(own[0])
        if lacking > 0 and layer is not None:
            own = [torch.cat((part, part[:1].expand(lacking, *part.shape[1:]))) for part in own]
        pieces.append(own[0] if layer is None else add(layer, *own)[:count])
    return rows.restored(torch.cat(pieces))
