"""`Descriptors`: file descriptors that are closed exactly once, at the end of a block at the latest."""

from __future__ import annotations

import asyncio
import os
from typing import Self


class Descriptors:
    """Owned file descriptors.

    A number closed twice may belong to another file by then, so each is forgotten when closed.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._open: set[int] = set()

    def add(self, descriptor: int) -> int:
        """Take ownership of a descriptor and return it."""
        self._open.add(descriptor)
        return descriptor

    def pipe(self) -> tuple[int, int]:
        """Return both ends of a new pipe, the read end first."""
        reading, writing = os.pipe()
        return self.add(reading), self.add(writing)

    def filled_pipe(self, data: bytes) -> int:
        """Return the read end of a new pipe with the data and an end; at most 4,096 bytes."""
        reading, writing = self.pipe()
        os.write(writing, data)
        self.close(writing)
        return reading

    def close(self, *descriptors: int) -> None:
        """Close some of the descriptors now; closed ones are ignored."""
        for descriptor in descriptors:
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)

    def close_all(self) -> None:
        """Close all that are open."""
        self.close(*self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_all()


async def read_pipe(descriptor: int, most: int = 10_000) -> bytes:
    """Read a pipe to its end, or its first bytes, without a thread that could not be stopped.

    Args:
        most: number of bytes after which reading stops.
    """
    loop, found = asyncio.get_running_loop(), bytearray()
    os.set_blocking(descriptor, False)
    while len(found) < most:
        await readable(loop, descriptor)
        try:
            chunk = os.read(descriptor, most - len(found))
        except BlockingIOError:
            continue
        if not chunk:
            break
        found += chunk
    return bytes(found)


async def readable(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    """Wait until a descriptor can be read from."""
    waiting: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiting.done():
            waiting.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await waiting
    finally:
        loop.remove_reader(descriptor)
