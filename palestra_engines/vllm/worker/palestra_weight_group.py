"""A process group for broadcasting weights from a trainer to the workers of vLLM servers.

Both sides import this module: the trainer's process as a part of Palestra, and vLLM's interpreter by itself, so it only
imports torch. The group is independent of torch's default one, which vLLM's workers use for themselves. The trainer is
rank 0. Gloo and NCCL are used alike, apart from the backend's name and device.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # of the numbers that a backend moves
BUCKET_BYTES = 64 * 2**20  # in one broadcast; a larger tensor has one for itself
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_SALT, _SEAL = 16, 32  # bytes of each entry of a store
_dist: Any = dist  # its type stubs leave out the stores and the backends


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """The weights of an update in sending order, and their division into buckets.

    Attributes:
        dtype: name of the common precision, such as `bfloat16`.
        bucket_bytes: limit of a bucket with more than one weight.
    """

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    dtype: str
    bucket_bytes: int

    @property
    def precision(self) -> torch.dtype:
        """Return the precision of all weights."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def buckets(self) -> list[list[tuple[str, Sequence[int]]]]:
        """Return the names and shapes of each bucket's weights, equal on both sides."""
        found: list[list[tuple[str, Sequence[int]]]] = []
        room = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = prod(shape) * self.precision.itemsize
            if size > room or not found:
                found.append([])
                room = self.bucket_bytes
            found[-1].append((name, shape))
            room -= size
        return found


def own_address(host: str, port: int, seconds: float) -> str:
    """Return the address with which this machine reaches another one, by connecting to it. `port` is that of a
    listening program on the other machine.
    """
    try:
        with socket.create_connection((host, port), seconds) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ConnectionError(
            f"{socket.gethostname()} can't reach the trainer at {host}:{port} (engine.weights_address): {error}"
        ) from error


def open_store(host: str, port: int, seconds: float, listening: int) -> Any:
    """Return a store of this process, through which the ranks of groups find each other. `listening` is a socket
    descriptor, which the store takes over.
    """
    limit = timedelta(seconds=seconds)
    return _dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening)


def reach_store(host: str, port: int, seconds: float) -> Any:
    """Return the store in the trainer's process, through which the ranks of a group find each other."""
    return _dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


class SealedStore(_dist.Store):  # type: ignore[misc]
    """Encrypted entries of one group's ranks in a store without a key.

    Other programs that reach the store can neither find the group's entries by name nor read them, so they can't take a
    rank's place. Modified entries are refused. Each entry is encrypted and signed with keys derived from the group's
    name, which the ranks get elsewhere.
    """

    def __init__(self, store: Any, name: str) -> None:
        """Encrypt entries of a store under a group's name, which cannot be guessed."""
        super().__init__()
        self._store, self._keys = store, {use: _keyed(name.encode(), use) for use in ("name", "value", "seal")}

    def set(self, key: str, value: bytes | str) -> None:
        """Set an entry."""
        plain, salt = value.encode() if isinstance(value, str) else bytes(value), secrets.token_bytes(_SALT)
        hidden = self._veiled(plain, salt)
        self._store.set(self._hidden(key), salt + self._seal(key, salt + hidden) + hidden)

    def get(self, key: str) -> bytes:
        """Return an entry, waiting for it."""
        found = bytes(self._store.get(self._hidden(key)))
        salt, seal, hidden = found[:_SALT], found[_SALT : _SALT + _SEAL], found[_SALT + _SEAL :]
        if not hmac.compare_digest(seal, self._seal(key, salt + hidden)):
            raise RuntimeError("a program that is no rank of this group has changed what the ranks say to one another")
        return self._veiled(hidden, salt)

    def wait(self, keys: Sequence[str], *limit: timedelta) -> None:
        """Wait until the entries exist."""
        self._store.wait([self._hidden(key) for key in keys], *limit)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether the entries exist."""
        return bool(self._store.check([self._hidden(key) for key in keys]))

    def delete_key(self, key: str) -> bool:
        """Remove an entry; return whether it existed."""
        return bool(self._store.delete_key(self._hidden(key)))

    def _hidden(self, key: str) -> str:
        return _keyed(self._keys["name"], key).hex()

    def _seal(self, key: str, content: bytes) -> bytes:
        return hashlib.blake2b(key.encode() + b"\0" + content, key=self._keys["seal"], digest_size=_SEAL).digest()

    def _veiled(self, content: bytes, salt: bytes) -> bytes:
        """Encrypt, or decrypt."""
        stream = hashlib.shake_256(self._keys["value"] + salt).digest(len(content))
        return bytes(a ^ b for a, b in zip(content, stream, strict=True))


def _keyed(key: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=key, digest_size=32).digest()


class WeightGroup:
    """One rank of the group."""

    def __init__(self, store: Any, name: str, backend: str, rank: int, size: int, address: str, seconds: float) -> None:
        """Meet the other ranks; with gloo this blocks until all have joined, with NCCL until the first broadcast.

        `name` is unique in the store, and only known to the group's ranks. Rank 0 sends the weights. `address`, this
        machine's for the other ranks, is not used by NCCL; `seconds` is the timeout of the rendezvous, or of one
        broadcast.
        """
        self._device, limit = torch.device(DEVICES[backend]), timedelta(seconds=seconds)
        store.set_timeout(limit)
        own = self._store = SealedStore(store, name)  # kept, because C++ does not keep what Python has made
        if backend == "gloo":
            options = _dist.distributed_c10d.ProcessGroupGloo._Options()
            options._devices = [_dist.distributed_c10d.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = limit
            self._group = _dist.distributed_c10d.ProcessGroupGloo(own, rank, size, options)
        else:
            options = _dist.distributed_c10d.ProcessGroupNCCL.Options()
            options._timeout = limit
            before = os.environ.get(_BLOCKING)
            os.environ[_BLOCKING] = "1"  # a broadcast that takes too long raises; otherwise it would end the process
            try:
                self._group = _dist.distributed_c10d.ProcessGroupNCCL(own, rank, size, options)
            finally:
                if before is None:
                    del os.environ[_BLOCKING]
                else:
                    os.environ[_BLOCKING] = before

    def send(self, weights: Iterable[tuple[str, Tensor]], layout: WeightLayout, sent: Callable[[int], None]) -> None:
        """Send weights to all other ranks, filling the next bucket while one is being sent. Weights are [n, d] or [d],
        in the layout's order, and rounded to its precision; `sent` is called with the bytes of each sent bucket.
        """
        left, before = iter(weights), None
        for bucket in layout.buckets():
            buffer = self._buffer(bucket, layout)
            for place, (_, weight) in zip(_places(buffer, bucket), islice(left, len(bucket)), strict=True):
                place[1].copy_(weight.detach())
            if before is not None:
                sent(self._wait(before))
            before = self._begin(buffer)
        if before is not None:
            sent(self._wait(before))

    def receive(self, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, [n, d] or [d], that rank 0 sends, receiving the next bucket while one is used.

        Tensors stay valid: later buckets do not reuse their memory.
        """
        buckets = layout.buckets()
        coming = self._begin(self._buffer(buckets[0], layout))
        for number, bucket in enumerate(buckets):
            buffer = coming[0]
            self._wait(coming)
            if number + 1 < len(buckets):
                coming = self._begin(self._buffer(buckets[number + 1], layout))
            yield from _places(buffer, bucket)

    def close(self) -> None:
        """Leave the group, so that the others' broadcasts fail. Blocks until a running broadcast has ended."""
        self._group.abort()
        del self._group

    def _buffer(self, bucket: Sequence[tuple[str, Sequence[int]]], layout: WeightLayout) -> Tensor:
        """Return memory, [numbers of the bucket], for the weights of a bucket."""
        size = sum(prod(shape) for _, shape in bucket)
        return torch.empty(size, dtype=layout.precision, device=self._device)

    def _begin(self, buffer: Tensor) -> tuple[Tensor, Any]:
        """Begin to broadcast a bucket, [numbers]; return it with a handle to wait for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return buffer, self._group.broadcast([buffer.view(torch.uint8)], options)

    def _wait(self, begun: tuple[Tensor, Any]) -> int:
        """Return the bytes of a bucket, [numbers], once it is there."""
        buffer, work = begun
        work.wait()
        return buffer.nbytes


def _places(buffer: Tensor, bucket: Sequence[tuple[str, Sequence[int]]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight's name and its view in the memory of a bucket, [numbers]."""
    start = 0
    for name, shape in bucket:
        size = prod(shape)
        yield name, buffer[start : start + size].view(tuple(shape))
        start += size
