"""Reads the answers of a server up to a bound: a server that sends without end must not fill this process's memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx2

from palestra.errors import EngineFailure

# The longest answers have a logprob, or twenty, for each token of a long prompt or reply.
MOST_BYTES = 64 * 2**20


async def read_body(answer: httpx2.Response, where: str) -> bytes:
    """Return the body of an answer.

    Raises:
        EngineFailure: it is longer than `MOST_BYTES`.
    """
    found = bytearray()
    async for chunk in answer.aiter_bytes():
        found += chunk
        if len(found) > MOST_BYTES:
            raise EngineFailure(f"{where} answered with more than {MOST_BYTES:,} bytes; is it the engine's server?")
    return bytes(found)


async def read_lines(answer: httpx2.Response, where: str) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer as they arrive, without line ends.

    Raises:
        EngineFailure: a line is longer than `MOST_BYTES`.
    """
    parts: list[bytes] = []  # of the line that has not ended; joined once, so that a long line costs linear time
    size = 0
    async for chunk in answer.aiter_bytes():
        first, *others = chunk.split(b"\n")
        parts.append(first)
        size += len(first)
        for start in others:
            yield b"".join(parts).rstrip(b"\r")
            parts, size = [start], len(start)
        if size > MOST_BYTES:
            raise EngineFailure(f"{where} sent a line of more than {MOST_BYTES:,} bytes; is it the engine's server?")
    if size:
        yield b"".join(parts).rstrip(b"\r")
