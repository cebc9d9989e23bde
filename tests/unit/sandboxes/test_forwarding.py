"""The way from a box to its server: the server's key is put into requests outside of the box, and never comes in."""

from __future__ import annotations

import asyncio
import socket

import pytest

from palestra_sandboxes.forwarding import Forwarder

KEY = b"the-real-key"


async def seen_by_the_server(*headers: str, target: str = "/") -> bytes:
    """Return the head that reaches a server; `{}` stands for the key that the box has."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        forwarder = Forwarder(f"http://127.0.0.1:{port}", KEY.decode())
        listening = socket.create_server(("127.0.0.1", 0))
        await forwarder.start(listening)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        head = "\r\n".join((f"GET {target} HTTP/1.1", *headers, "", ""))
        writer.write(head.replace("{}", forwarder.stand_in or "").encode())
        await reader.read()
        writer.close()
        await forwarder.close()
    return seen[0]


@pytest.mark.parametrize("header", ["Authorization: Bearer {}", "authorization:bearer  {} ", "X-Api-Key: {}"])
async def test_the_key_takes_the_place_of_the_one_that_the_box_has(header):
    head = await seen_by_the_server("Host: x", header, "Connection: keep-alive")
    assert header.replace("{}", KEY.decode()).encode() in head
    assert b"Connection: close" in head
    assert b"keep-alive" not in head


@pytest.mark.parametrize(
    "header",
    ["Host: {}", "X-Request-Id: {}", "Authorization: Basic {}", "X-Api-Key: {}x"],
)
async def test_what_a_server_may_return_has_no_key(header):
    head = await seen_by_the_server(header, target="/{}/?key={}")
    assert KEY not in head


async def test_a_head_whose_end_a_server_may_see_earlier_is_not_passed_on():
    with pytest.raises(IndexError):  # nothing has reached it
        await seen_by_the_server("Host: x\nContent-Length: 99\n\nthe body:", "X-Api-Key: {}")
