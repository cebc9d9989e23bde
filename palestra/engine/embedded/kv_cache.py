"""Keys and values of the sequences that are being decoded, for one model.

Sequences lie in buckets by capacity, which follows from a sequence's own length alone: all rows of a bucket are
attended to in one call, and what a row is padded to never depends on its neighbours. A row that outgrows its bucket
moves to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

STEP = 64


def capacity_for(length: int) -> int:
    """Return the smallest bucket for so many positions: steps of 64 to 1024, then 1/16 of the next power of two."""
    step = STEP
    while length > 16 * step:
        step *= 2
    return -(-length // step) * step


@dataclass(slots=True, eq=False)
class Row:
    """One sequence's place: `length` positions of `bucket` row `index` are filled."""

    length: int
    bucket: Bucket = field(init=False)
    index: int = field(init=False)


class Bucket:
    """Rows of one capacity, kept without gaps. Storage: [layers, 2, rows, key heads, capacity, head dim]."""

    def __init__(
        self, capacity: int, layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self.storage = torch.zeros((layers, 2, 4, heads, capacity, dim), dtype=dtype, device=device)

    def add(self, row: Row) -> None:
        """Give a row a place of zeros, the beginning of which the caller fills."""
        if len(self.rows) == self.storage.shape[2]:
            self.storage = torch.cat((self.storage, torch.zeros_like(self.storage)), dim=2)
        row.bucket, row.index = self, len(self.rows)
        self.rows.append(row)
        # What an earlier row has left is masked; but a weight of 0 times a number that is not finite is none.
        self.storage[:, :, row.index] = 0.0

    def remove(self, row: Row) -> None:
        """Free a row's place; the last row takes it."""
        last = self.rows.pop()
        if last is not row:
            self.storage[:, :, row.index] = self.storage[:, :, last.index]
            self.rows[row.index] = last
            last.index = row.index


class KVCache:
    """All buckets of one policy's model."""

    def __init__(self, layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (layers, heads, dim, dtype, device)
        self._buckets: dict[int, Bucket] = {}

    def insert(self, prefix: Tensor) -> Row:
        """Add a row that starts with a prompt's keys and values, [layers, 2, key heads, T, head dim]."""
        length = prefix.shape[3]
        row = Row(length)
        bucket = self._bucket(capacity_for(length + 1))
        bucket.add(row)
        bucket.storage[:, :, row.index, :, :length] = prefix
        return row

    def remove(self, row: Row) -> None:
        """Free the place of a sequence that has ended, and its bucket with the last row in it."""
        row.bucket.remove(row)
        if not row.bucket.rows:
            del self._buckets[row.bucket.capacity]

    def make_room(self, row: Row) -> None:
        """Move a full row to the next bucket."""
        if row.length < row.bucket.capacity:
            return
        old, index = row.bucket, row.index
        bucket = self._bucket(capacity_for(row.length + 1))
        content = old.storage[:, :, index].clone()
        self.remove(row)
        bucket.add(row)
        bucket.storage[:, :, row.index, :, : row.length] = content

    def in_order(self) -> list[Bucket]:
        """Return the buckets from the smallest; the flat batch of a decoding pass lies in this order."""
        return [self._buckets[capacity] for capacity in sorted(self._buckets)]

    def _bucket(self, capacity: int) -> Bucket:
        if capacity not in self._buckets:
            self._buckets[capacity] = Bucket(capacity, *self._shape)
        return self._buckets[capacity]
