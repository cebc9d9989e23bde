from __future__ import annotations

import pytest
import torch

from palestra.engine.embedded import kv_cache
from palestra.engine.embedded.kv_cache import DecodeAttention, KVCache, PrefillAttention, capacity_for
from palestra.models.kernels import Kernels

LAYERS, HEADS, DIM = 2, 2, 4


def cache() -> KVCache:
    return KVCache(LAYERS, HEADS, DIM, torch.float32, torch.device("cpu"))


def prefix(length: int, mark: float) -> torch.Tensor:
    """Keys and values that can be told apart by their row and place."""
    places = torch.arange(length, dtype=torch.float32).view(1, 1, 1, length, 1) / 1000
    return (mark + places).expand(LAYERS, 2, HEADS, length, DIM).clone()


def content(row) -> torch.Tensor:
    return row.bucket.storage[:, :, row.index, :, : row.length]


def test_capacities_are_the_documented_ones():
    """Steps of 64 up to 1024, then of a sixteenth of the next power of two."""
    assert [capacity_for(n) for n in (1, 64, 65, 128, 1000, 1024)] == [64, 64, 128, 128, 1024, 1024]
    assert [capacity_for(n) for n in (1025, 1152, 2048, 2049, 4096, 5000)] == [1152, 1152, 2048, 2304, 4096, 5120]


def test_capacity_is_enough_monotone_and_wastes_little():
    before = 0
    for length in range(1, 20_000):
        capacity = capacity_for(length)
        assert length <= capacity <= max(length + 63, length * 9 / 8)
        assert capacity >= before
        assert capacity_for(capacity) == capacity
        before = capacity


def test_a_row_has_room_for_one_more_than_its_prompt():
    rows = {length: cache().insert(prefix(length, 1.0)) for length in (1, 63, 64, 127)}
    assert {length: row.bucket.capacity for length, row in rows.items()} == {1: 64, 63: 64, 64: 128, 127: 128}


def test_rows_keep_their_content_while_others_come_grow_and_go():
    kv = cache()
    rows = {}
    for number in range(12):  # more than a bucket has room for at first
        length = 10 + number % 3 * 60
        rows[number] = (kv.insert(prefix(length, float(number))), length)
    for number in (0, 3, 11, 5):
        kv.remove(rows.pop(number)[0])
    rows[20] = (kv.insert(prefix(33, 20.0)), 33)
    for number, (row, length) in rows.items():
        assert torch.equal(content(row), prefix(length, float(number)))
    for bucket in kv.in_order():
        assert [row.index for row in bucket.rows] == list(range(len(bucket.rows)))


def test_a_full_row_moves_to_the_next_bucket_with_its_content():
    kv = cache()
    stays, moves = kv.insert(prefix(10, 1.0)), kv.insert(prefix(63, 2.0))
    kv.free_capacity(moves)
    assert moves.bucket.capacity == 64  # one place is left
    moves.bucket.storage[:, :, moves.index, :, 63] = 7.0
    moves.length = 64
    kv.free_capacity(moves)
    assert [b.capacity for b in kv.in_order()] == [64, 128]
    assert torch.equal(content(moves)[:, :, :, :63], prefix(63, 2.0))
    assert (content(moves)[:, :, :, 63] == 7.0).all()
    assert torch.equal(content(stays), prefix(10, 1.0))


def test_an_empty_bucket_is_given_up():
    kv = cache()
    row = kv.insert(prefix(5, 1.0))
    kv.remove(row)
    assert kv.in_order() == []


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query head over the keys and values that it may see, by the definition, in float64."""
    weights = torch.softmax((keys.double() @ query.double()) * scale, dim=0)
    return weights @ values.double()


@pytest.mark.parametrize(
    "pieces", [[(0, 1)], [(0, 5)], [(0, 3), (0, 1), (0, 70)], [(4, 1)], [(7, 60), (0, 5), (64, 2)]]
)
def test_a_piece_of_a_prompt_sees_what_is_filled_and_what_of_the_piece_is_before_it(pieces):
    generator = torch.Generator().manual_seed(0)
    total, heads = sum(new for _, new in pieces), 4
    query = torch.randn((1, heads, total, DIM), generator=generator)
    key, value = (torch.randn((1, HEADS, total, DIM), generator=generator) for _ in range(2))
    kept = [torch.randn((1, 2, HEADS, filled + new + 3, DIM), generator=generator) for filled, new in pieces]
    before = [k.clone() for k in kept]
    attend = PrefillAttention([(k, filled, new) for k, (filled, new) in zip(kept, pieces, strict=True)])
    out = attend(0, query, key, value, 0.37)
    start = 0
    for number, (filled, new) in enumerate(pieces):
        part = slice(start, start + new)
        keys = torch.cat((before[number][0, 0, :, :filled], key[0, :, part]), dim=1)
        values = torch.cat((before[number][0, 1, :, :filled], value[0, :, part]), dim=1)
        assert torch.equal(kept[number][0, 0, :, : filled + new], keys)
        assert torch.equal(kept[number][0, 1, :, : filled + new], values)
        assert torch.equal(kept[number][:, :, :, filled + new :], before[number][:, :, :, filled + new :])
        for place in range(new):
            seen = slice(0, filled + place + 1)
            for head in range(heads):
                wanted = attention(query[0, head, start + place], keys[head // 2, seen], values[head // 2, seen], 0.37)
                assert torch.allclose(out[start + place, head].double(), wanted, atol=1e-5)
        start += new


@pytest.mark.parametrize(
    ("dtype", "compiled", "error"),
    [(torch.float32, True, 1e-5), (torch.bfloat16, True, 2**-8), (torch.bfloat16, False, 2**-6)],
    ids=["float32", "bfloat16 by kernels", "bfloat16 by torch"],
)
def test_a_decoding_step_sees_its_own_row_and_nothing_else(monkeypatch, dtype, compiled, error):
    if not compiled:
        monkeypatch.setattr(kv_cache, "kernels", Kernels)
    kv, heads = KVCache(LAYERS, HEADS, DIM, dtype, torch.device("cpu")), 4
    generator = torch.Generator().manual_seed(1)
    prefixes = [torch.randn((LAYERS, 2, HEADS, n, DIM), generator=generator).to(dtype) for n in (5, 100, 1, 63, 7)]
    rows = [kv.insert(p) for p in prefixes]
    buckets = kv.in_order()
    order = [rows.index(row) for bucket in buckets for row in bucket.rows]
    query = torch.randn((1, heads, 6, DIM), generator=generator).to(dtype)  # a sixth row that is no sequence
    key, value = (torch.randn((1, HEADS, 6, DIM), generator=generator).to(dtype) for _ in range(2))
    out = DecodeAttention.of(buckets)(1, query, key, value, 0.5)
    for place, number in enumerate(order):
        row, new = rows[number], (key[0, :, place], value[0, :, place])
        assert torch.equal(row.bucket.storage[1, :, row.index, :, row.length], torch.stack(new))
        for head in range(heads):
            keys = torch.cat((prefixes[number][1, 0, head // 2], key[0, head // 2, place : place + 1]))
            values = torch.cat((prefixes[number][1, 1, head // 2], value[0, head // 2, place : place + 1]))
            wanted = attention(query[0, head, place], keys, values, 0.5)
            assert torch.allclose(out[place, head].double(), wanted, rtol=error, atol=error / 4)
    assert (out[5] == 0).all()


@pytest.mark.parametrize("grown", [False, True])
def test_nothing_is_left_of_a_row_that_was_not_finite(grown):
    """A weight of 0 times a number that is none is none: what another policy has computed would spoil the next row."""
    kv = cache()
    stays = kv.insert(prefix(9, 2.0))  # its bucket lives on
    gone = kv.insert(prefix(63, float("nan")))
    if grown:  # it leaves for the next bucket, and ends there
        other = kv.insert(prefix(100, 3.0))
        gone.length = 64
        kv.free_capacity(gone)
        assert gone.bucket is other.bucket
    kv.remove(gone)
    rows = [stays, kv.insert(prefix(5, 4.0)), *([other, kv.insert(prefix(70, 5.0))] if grown else [])]
    ones = torch.ones((1, HEADS, len(rows), DIM))
    assert DecodeAttention.of(kv.in_order())(0, ones, ones, ones, 0.5).isfinite().all()
