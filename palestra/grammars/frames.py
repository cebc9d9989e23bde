"""Frames on a stream socket: four bytes of length (little-endian), followed by as many bytes of payload."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def send_frame(to: socket.socket, payload: bytes) -> None:
    """Send one frame, and return when the operating system has taken all of it."""
    to.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(of: socket.socket) -> bytearray:
    """Wait for one frame and return its payload.

    Raises:
        EOFError: the other side closed the socket.
    """
    (length,) = _LENGTH.unpack(_exactly(of, _LENGTH.size))
    return _exactly(of, length)


def send_json(to: socket.socket, value: Any) -> None:
    """Send one frame whose payload is `value` as JSON."""
    send_frame(to, json.dumps(value).encode())


def receive_json(of: socket.socket) -> Any:
    """Wait for one frame and return its payload as parsed JSON; errors as in `receive_frame`."""
    return json.loads(receive_frame(of))


def _exactly(of: socket.socket, length: int) -> bytearray:
    """Receive `length` bytes."""
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        count = of.recv_into(view[have:])
        if count == 0:
            raise EOFError
        have += count
    return data
