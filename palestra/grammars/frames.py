"""Frames on a stream socket: a length, and as many bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def send_frame(to: socket.socket, payload: bytes) -> None:
    """Send one frame."""
    to.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(of: socket.socket) -> bytearray:
    """Receive one frame.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(_exactly(of, _LENGTH.size))
    return _exactly(of, length)


def send_json(to: socket.socket, value: Any) -> None:
    """Send one frame of JSON."""
    send_frame(to, json.dumps(value).encode())


def receive_json(of: socket.socket) -> Any:
    """Receive one frame of JSON; see `receive_frame`."""
    return json.loads(receive_frame(of))


def _exactly(of: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        count = of.recv_into(view[have:])
        if count == 0:
            raise EOFError
        have += count
    return data
