"""Keys and values of decoding sequences of one model, and attention over them.

vLLM allocates its cache in blocks as replies grow, and preempts a request when there are none left. Here a request
reserves memory for its longest possible reply before it begins, so nothing is preempted: a preempted reply would be
recomputed in other passes, and round differently.

Sequences are in buckets by capacity, which follows from a sequence's own length: all rows of a bucket are one attention
call, and a row's padding never depends on other rows. A row that outgrows its bucket moves to the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.engine.embedded.prefix_cache import PrefixCache
from palestra.models.kernels import kernels


@dataclass(slots=True)
class KVBudget:
    """The bytes that the keys and values of an engine's models share."""

    total: int
    reserved: int = 0  # by requests that have begun
    prefixes: list[tuple[PrefixCache, int]] = field(default_factory=list)  # of each policy, with the bytes of a token

    @property
    def kept(self) -> int:
        """Return the bytes of cached prefixes, of all policies together."""
        return sum(cache.tokens * each for cache, each in self.prefixes)

    def reserve(self, size: int) -> bool:
        """Reserve bytes for a request, evicting cached prefixes; False: other requests leave too few."""
        if self.reserved + size > self.total:
            return False
        for cache, each in self.prefixes:
            too_many = self.kept + self.reserved + size - self.total
            if too_many > 0:
                cache.shrink(cache.tokens - -(-too_many // each))
        self.reserved += size  # last: `Engine.load` reads from other threads, and never sees more than `total`
        return True

    def release(self, size: int) -> None:
        """Release the reservation of a request that has ended."""
        self.reserved -= size

    def room_for(self, prefixes: PrefixCache, each: int) -> int:
        """Return how many tokens a policy's cached prefixes may have in all, at `each` bytes per token."""
        others = self.kept - prefixes.tokens * each
        return max(0, (self.total - self.reserved - others) // each)


STEP = 64
WIDE_STEP = 256


def capacity_for(length: int) -> int:
    """Return the smallest bucket for a length: steps of 64 up to 1024, then 1/16 of the next power of two."""
    step = STEP
    while length > 16 * step:
        step *= 2
    return -(-length // step) * step


def wide_capacity_for(length: int) -> int:
    """Return the smallest bucket for a length, with few different buckets: powers of two from 256."""
    return max(WIDE_STEP, 1 << (length - 1).bit_length())


@dataclass(slots=True, eq=False)
class Row:
    """One sequence: `length` positions of row `index` of `bucket` are filled.

    `position` is the model's position of the next token; after pictures with 2D positions it is less than `length`.
    """

    length: int
    position: int
    bucket: Bucket = field(init=False)
    index: int = field(init=False)

    @contextlib.contextmanager
    def alone(self) -> Iterator[DecodeAttention]:
        """Yield the attention of a pass over this row without the others of its bucket."""
        storage = self.bucket.storage[:, :, self.index : self.index + 1]
        copy = storage.contiguous()  # as compiled functions read it
        yield DecodeAttention([(copy, torch.tensor([self.length], device=copy.device))])
        storage.copy_(copy)


class Bucket:
    """Rows of one capacity, stored without gaps.

    Attributes:
        storage: [layers, 2, allocated rows, key heads, capacity, head dim].
        captured: prepared decoding passes over this storage, by policy; see `DecodeGraphs`.
    """

    def __init__(
        self, capacity: int, layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self.storage = torch.zeros((layers, 2, 4, heads, capacity, dim), dtype=dtype, device=device)
        self.captured: dict[str, Any] = {}

    def add(self, row: Row) -> None:
        """Append a row of zeros, whose beginning the caller fills."""
        if len(self.rows) == self.storage.shape[2]:
            layers, pair, rows, *shape = self.storage.shape
            wider = self.storage.new_empty((layers, pair, 2 * rows, *shape))
            wider[:, :, :rows] = self.storage
            self.storage, self.captured = wider, {}
        row.bucket, row.index = self, len(self.rows)
        self.rows.append(row)
        # What an earlier row has left is masked; but a weight of 0 times a number that is not finite is none.
        self.storage[:, :, row.index] = 0.0

    def remove(self, row: Row) -> None:
        """Remove a row; the last row moves to its index."""
        last = self.rows.pop()
        if last is not row:
            self.storage[:, :, row.index] = self.storage[:, :, last.index]
            self.rows[row.index] = last
            last.index = row.index


class KVCache:
    """All buckets of one policy's model.

    Attributes:
        capacity: returns the bucket size for a length.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity: Callable[[int], int] = capacity_for,
        kept_bytes: int = 0,
    ) -> None:
        """Create an empty cache. `capacity` returns the bucket size for a length; `kept_bytes` limits buckets without
        rows that stay allocated.
        """
        self._shape = (layers, heads, dim, dtype, device)
        self.capacity, self._kept_bytes = capacity, kept_bytes
        self._buckets: dict[int, Bucket] = {}

    def insert(self, prefix: Tensor, position: int | None = None) -> Row:
        """Add a row. `prefix` has keys and values of its prompt, [layers, 2, key heads, T, head dim]; `position` is
        that of the token after it, by default T.
        """
        length = prefix.shape[3]
        row = Row(length, length if position is None else position)
        bucket = self._bucket(self.capacity(length + 1))
        bucket.add(row)
        bucket.storage[:, :, row.index, :, :length] = prefix
        return row

    def remove(self, row: Row) -> None:
        """Remove a row whose sequence has ended, and its bucket if that is empty."""
        row.bucket.remove(row)
        if not row.bucket.rows:
            self.drop_empty(self._kept_bytes)

    def drop_empty(self, most: int = 0) -> None:
        """Free empty buckets if they have more than `most` bytes together."""
        empty = [bucket for bucket in self._buckets.values() if not bucket.rows]
        if sum(bucket.storage.nbytes for bucket in empty) > most:
            for bucket in empty:
                del self._buckets[bucket.capacity]

    def forget(self, policy: str) -> None:
        """Drop prepared passes of a policy: they refer to its weights, which are freed."""
        for bucket in self._buckets.values():
            bucket.captured.pop(policy, None)

    def free_capacity(self, row: Row) -> None:
        """Move a full row to the next bucket; without memory for that, the row is unchanged."""
        if row.length < row.bucket.capacity:
            return
        bucket, moved = self._bucket(self.capacity(row.length + 1)), Row(row.length, row.position)
        bucket.add(moved)
        bucket.storage[:, :, moved.index, :, : row.length] = row.bucket.storage[:, :, row.index]
        self.remove(row)
        bucket.rows[moved.index] = row
        row.bucket, row.index = bucket, moved.index

    def in_order(self) -> list[Bucket]:
        """Return the buckets with rows, smallest first: the order of a decoding pass's flat batch."""
        return [self._buckets[capacity] for capacity in sorted(self._buckets) if self._buckets[capacity].rows]

    def _bucket(self, capacity: int) -> Bucket:
        if capacity not in self._buckets:
            self._buckets[capacity] = Bucket(capacity, *self._shape)
        return self._buckets[capacity]


class DecodeAttention:
    """Attention of a decoding pass: every row of the cache adds one position, and attends to all before it.

    The bits of a row's result do not depend on the number of rows.

    Attributes:
        parts: each bucket's storage, [layers, 2, allocated rows, key heads, capacity, head dim], and the filled
            positions of its first rows, int64 [rows], less than the capacity.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the cache's rows, in the order of the parts."""
        self.parts, self.compiled = parts, kernels().decoding(parts)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> DecodeAttention:
        """Return the attention of all rows of some buckets, each with at least one row and no full row."""
        if any(row.length >= bucket.capacity for bucket in buckets for row in bucket.rows):
            raise ValueError("a row is full; `free_capacity` moves it")
        return cls(
            [
                (bucket.storage, torch.tensor([row.length for row in bucket.rows], device=bucket.storage.device))
                for bucket in buckets
            ]
        )

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Write keys and values into the cache, and return the attention output, [T, heads, head dim]; see
        `AttentionBackend`.

        Queries beyond the cache's rows only enlarge a product, and get zeros. `window` counts a token's own position;
        None: all before it.
        """
        count = sum(len(lengths) for _, lengths in self.parts)
        new = query[:, :, :count], key[:, :, :count], value[:, :, :count]
        seen = self.compiled(layer, *new, scale, window)
        return _filled_up([*self._by_parts(layer, *new, scale, window)] if seen is None else [seen], query)

    def _by_parts(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Iterator[Tensor]:
        """Compute bucket by bucket with torch's attention: yield [rows, heads, head dim] of each."""
        start = 0
        for number, (storage, lengths) in enumerate(self.parts):
            rows = len(lengths)
            keys, values = storage[layer, 0, :rows], storage[layer, 1, :rows]
            new = query[:, :, start : start + rows], key[:, :, start : start + rows], value[:, :, start : start + rows]
            yield _attended(new, keys, values, lengths, scale, self._mask(number, window))
            start += rows

    def _mask(self, number: int, window: int | None) -> Tensor:
        """Return the mask added to the scores of a part, [rows, 1, 1, capacity], computed once for all layers."""
        mask = self._masks.get((number, window))
        if mask is None:
            storage, lengths = self.parts[number]
            before = lengths.unsqueeze(1) - torch.arange(storage.shape[4], device=storage.device)
            unseen = before < 0 if window is None else (before < 0) | (before >= window)
            # Of a mask of booleans, each layer would make this one.
            mask = torch.zeros(unseen.shape, dtype=storage.dtype, device=storage.device)
            mask = mask.masked_fill_(unseen, -torch.inf).view(len(lengths), 1, 1, -1)
            self._masks[number, window] = mask
        return mask


def _filled_up(pieces: list[Tensor], query: Tensor) -> Tensor:
    """Return pieces [n, H, D] as [T, H, D]: the last queries [1, H, T, D] only make a product larger, and get zeros."""
    count = sum(map(len, pieces))
    if count < query.shape[2]:
        pieces.append(query.new_zeros((query.shape[2] - count, query.shape[1], query.shape[3])))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _attended(
    new: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, lengths: Tensor, scale: float, mask: Tensor
) -> Tensor:
    """Append keys and values of one token per row to a cache, and return the attention output, [R, H, D]."""
    query, key, value = (one[0].transpose(0, 1) for one in new)
    index = torch.arange(len(lengths), device=lengths.device)
    keys[index, :, lengths] = key
    values[index, :, lengths] = value
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[2])  # heads that read the same keys together
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(query.shape)


class PrefillAttention:
    """Causal attention within concatenated chunks of several prompts; stores their keys and values."""

    def __init__(self, pieces: Sequence[tuple[Tensor, int, int]]) -> None:
        """Each chunk is (keys [layers, 2, key heads, P, head dim], number of filled tokens, number of
        tokens to add).
        """
        self._pieces, self._compiled = pieces, kernels().prompts(pieces)
        self._tokens = sum(new for _, _, new in pieces)
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Write keys and values into the cache, and return the attention output, [T, heads, head dim]; see
        `AttentionBackend`.

        Tokens beyond the chunks keep products above one row, and get zeros. `window` counts a token's own position;
        None: all before it.
        """
        new = query[:, :, : self._tokens], key[:, :, : self._tokens], value[:, :, : self._tokens]
        seen = self._compiled(layer, *new, scale, window)
        return _filled_up(self._by_pieces(layer, *new, scale, window) if seen is None else [seen], query)

    def _by_pieces(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> list[Tensor]:
        """Compute chunk by chunk with torch's attention: return [tokens, heads, head dim] of each."""
        results = []
        start = 0
        for number, (kept, filled, new) in enumerate(self._pieces):
            part = slice(start, start + new)
            if (number, window) not in self._masks:
                self._masks[number, window] = _seen(filled, new, window, kept.device)
            mask = self._masks[number, window]
            keys, values = kept[layer, 0, :, : filled + new], kept[layer, 1, :, : filled + new]
            keys[:, filled:], values[:, filled:] = key[0, :, part], value[0, :, part]
            seen = F.scaled_dot_product_attention(
                query[:, :, part],
                key[:, :, part] if mask is None else keys.unsqueeze(0),
                value[:, :, part] if mask is None else values.unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            results.append(seen[0].transpose(0, 1))
            start += new
        return results


def _seen(filled: int, new: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the attention mask of new tokens, bool [new, filled + new]; None: causal attention."""
    if not filled and (window is None or new <= window):
        return None
    seen = torch.ones((new, filled + new), dtype=torch.bool, device=device).tril(diagonal=filled)
    return seen if window is None else seen.triu(diagonal=filled - window + 1)
