"""The process group over which weights are broadcast: what arrives, and what is said where a rank is missing."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from palestra.errors import ConfigError
from palestra_engines.vllm.rendezvous import Rendezvous
from palestra_engines.vllm.worker.palestra_weight_group import (
    SealedStore,
    WeightGroup,
    WeightLayout,
    own_address,
    reach_store,
)

SHAPES = [(3, 5), (7,), (40, 2), (1, 1), (6,)]
NAMED = [(f"w{number}", torch.randn(shape) + number) for number, shape in enumerate(SHAPES)]


def layout_of(bucket_bytes: int, dtype="bfloat16") -> WeightLayout:
    return WeightLayout(
        names=[name for name, _ in NAMED], shapes=[list(one.shape) for _, one in NAMED], dtype=dtype,
        bucket_bytes=bucket_bytes,
    )  # fmt: skip


def rank_of(place: Rendezvous, name: str, rank: int, size: int) -> WeightGroup:
    address = own_address(place.host, place.port, place.seconds)
    store = reach_store(place.host, place.port, place.seconds)
    return WeightGroup(store, name, "gloo", rank, size, address, place.seconds)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as found:
        yield found


def test_all_weights_arrive_rounded_and_none_is_written_over(pool):
    place = Rendezvous(None, "gloo", 20.0)
    for dtype, bucket_bytes in (("bfloat16", 40), ("bfloat16", 1 << 20), ("float32", 1)):
        layout, sizes, name = layout_of(bucket_bytes, dtype), [], place.new_name()
        others = [pool.submit(rank_of, place, name, rank, 3) for rank in (1, 2)]
        with closing(place.meet(name, 3)) as group:
            received = [pool.submit(lambda one: list(one.result().receive(layout)), other) for other in others]  # noqa: B023
            group.send(NAMED, layout, sizes.append)
            for found in received:
                assert [one for one, _ in found.result()] == layout.names
                for (_, got), (_, sent) in zip(found.result(), NAMED, strict=True):
                    assert torch.equal(got, sent.to(layout.precision))
        assert sum(sizes) == sum(one.numel() for _, one in NAMED) * layout.precision.itemsize
        assert len(sizes) == len(layout.buckets())
    assert not dist.is_initialized()  # the default group of a vLLM worker is its own


def test_a_bucket_has_a_bound_and_a_large_tensor_one_for_itself():
    sizes = [
        [len(bucket), sum(torch.Size(shape).numel() * 2 for _, shape in bucket)] for bucket in layout_of(50).buckets()
    ]
    assert sizes == [[2, 44], [1, 160], [2, 14]]
    assert [name for bucket in layout_of(50).buckets() for name, _ in bucket] == layout_of(50).names


def test_a_rank_that_stands_still_or_leaves_fails_the_broadcast_in_time(pool):
    layout = layout_of(1)
    for leaves in (False, True):
        place, goes_on = Rendezvous(None, "gloo", 1.0), threading.Event()
        name = place.new_name()

        def stands(name=name, place=place, goes_on=goes_on, leaves=leaves):
            group = rank_of(place, name, 1, 2)
            next(group.receive(layout))
            if leaves:
                group.close()
            goes_on.wait(30)

        other = pool.submit(stands)
        group = place.meet(name, 2)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"Timed out|closed|reset"):
            group.send(NAMED, layout, lambda _: None)
        assert time.monotonic() - began < 20
        group.close()
        goes_on.set()
        other.result()


def test_ranks_that_do_not_come_are_waited_for_up_to_the_limit():
    place = Rendezvous(None, "gloo", 0.5)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        place.meet(place.new_name(), 2)
    assert time.monotonic() - began < 15


def test_only_the_named_address_is_listened_to():
    place = Rendezvous(None, "gloo", 5.0)
    assert place.host == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", place.port), 5):
        pass
    # Of the loopback network, too, so that a socket for all addresses of the machine would answer.
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", place.port), 5):
        pass
    named = Rendezvous(f"127.0.0.2:{place.port}", "gloo", 5.0)  # the port is free there
    assert (named.host, named.port) == ("127.0.0.2", place.port)


def test_what_can_not_be_listened_to_or_reached_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*use.*engine\.weights_address"):
            Rendezvous(f"127.0.0.1:{port}", "gloo", 5.0)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*engine\.weights_address"):  # an address of documentation
        Rendezvous("192.0.2.1", "gloo", 5.0)
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port}.*engine\.weights_add"):
        own_address("127.0.0.1", port, 5.0)


def test_a_broadcast_of_nccl_that_takes_too_long_raises_and_does_not_end_the_process(monkeypatch):
    """Without the variable, a thread of torch ends the process; other groups of the process are not to have it."""
    made = []

    class Recorded:
        class Options:
            _timeout = None

        def __init__(self, store, rank, size, options):
            made.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), rank, size, options._timeout.total_seconds()))

    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", Recorded, raising=False)
    place = Rendezvous(None, "gloo", 5.0)
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        WeightGroup(reach_store(place.host, place.port, 5.0), "name", "nccl", 1, 3, "127.0.0.1", 7.0)
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert made == [("1", 1, 3, 7.0)] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused_before_anything_listens():
    with pytest.raises(ConfigError, match=r"'nccl'.*GPU.*'gloo'"):
        Rendezvous(None, "nccl", 5.0)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_who_reaches_the_store_can_neither_read_nor_take_part_in_what_ranks_say():
    open_to_all = dist.HashStore()
    ours, theirs = SealedStore(open_to_all, "name"), SealedStore(open_to_all, "another name")
    ours.set("0/1", b"127.0.0.1:4711" * 20)
    assert ours.get("0/1") == b"127.0.0.1:4711" * 20
    assert ours.check(["0/1"])
    assert not theirs.check(["0/1"])
    (left,) = keys = open_to_all.list_keys()
    assert "0/1" not in left
    assert b"4711" not in bytes(open_to_all.get(left))
    ours.set("0/2", b"")
    assert ours.get("0/2") == b""
    (other,) = set(open_to_all.list_keys()) - set(keys)
    open_to_all.set(other, bytes(open_to_all.get(left)))  # an entry in the place of another
    for forged in ("0/2", "0/1"):
        with pytest.raises(RuntimeError, match=r"rank.*changed"):
            ours.get(forged)
        open_to_all.set(left, b"short")


@pytest.mark.parametrize("address", ["0.0.0.0", "0", "0.0.0.0:29600"])
def test_an_address_of_all_networks_is_refused(address):
    with pytest.raises(ConfigError, match=r"networks.*name"):
        Rendezvous(address, "gloo", 5.0)
