"""Messages between a job and the processes of its trainer's ranks: pickled objects behind their length.

Both ends are one program, and trust what the other sends. On one machine the socket between them has no name, so that
no other process can send anything; between machines it is a TCP connection, which was opened with a secret
(`runtime.ray.process_host`) and is as safe as the network of the cluster.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Request:
    """A call of one method of `Rank`.

    Attributes:
        name: of the method.
        arguments: in order.
    """

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method has returned.

    Attributes:
        result: see there; None after an error.
        error: what was raised; None: nothing was, or another rank has the error.
        failed: whether this rank or another has failed, and all of them have taken the request back.
        broken: whether this rank has failed in a way that leaves the ranks apart from one another.
        trace: where that was, in lines for a log.
    """

    result: Any = None
    error: Exception | None = None
    failed: bool = False
    broken: bool = False
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, which a rank also sends while it computes."""


HEADER_BYTES = _LENGTH.size


def packed(message: object) -> bytes:
    """Return the bytes of a message."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def length_of(header: bytes) -> int:
    """Return how many bytes follow the `HEADER_BYTES` of a message."""
    (length,) = _LENGTH.unpack(header)
    return int(length)


def unpacked(content: bytes) -> Any:
    """Return the message of these bytes."""
    return pickle.loads(content)


def receive(from_job: socket.socket) -> Any:
    """Wait for a message of the job.

    Raises:
        EOFError: the job has closed its end, or has died.
    """
    return unpacked(_exactly(from_job, length_of(_exactly(from_job, HEADER_BYTES))))


def _exactly(from_job: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = from_job.recv(min(count - len(found), 2**20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)
