"""Clients that send or read too slowly, or not at all: they get no place, and others are served."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import openai
import pytest
from test_dialect import asks, recorded, speaking, until

from palestra.http import guard
from palestra.server import app, respond

IDLE = 2000
SLOW = 10


@contextmanager
def connection(url: str, sent: bytes = b"", window: int | None = None) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as made:
        if window is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        made.connect((host, int(port)))
        made.sendall(sent)
        made.setblocking(False)
        yield made


def request(key: str, body: dict[str, Any], missing: int = 0) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content[: len(content) - missing]


async def is_served(ai: openai.AsyncOpenAI) -> None:
    async with asyncio.timeout(10):
        answer = await ai.chat.completions.create(**asks("text"))
    assert answer.choices[0].message.content


async def ask_until(ai: openai.AsyncOpenAI, refused: bool) -> None:
    """Send calls until one is refused for want of memory, or until one is answered."""
    async with asyncio.timeout(10):
        while True:
            try:
                await ai.chat.completions.create(**asks("y" * 7_000))
            except openai.RateLimitError as error:
                if refused and "memory for bodies" in str(error):
                    return
            else:
                if not refused:
                    return


async def test_connections_that_never_send_and_bodies_that_never_end_take_no_place(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, _):
        with ExitStack() as stack:
            for _ in range(IDLE):
                stack.enter_context(connection(job.url))
            for _ in range(100):
                stack.enter_context(connection(job.url, request(ai.api_key, asks("text"), missing=5)))
            await is_served(ai)
            assert job.plane.sessions.in_flight == 0


async def test_a_body_that_stops_arriving_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    async with speaking(tmp_path) as (job, _, ai, _):
        with connection(job.url, request(ai.api_key, asks("text"), missing=5)) as half:
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(half, 2000), 10)
            assert answer.startswith(b"HTTP/1.1 422")
            assert b"nothing more of the body came" in answer
        await is_served(ai)


async def test_all_bodies_together_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "BODIES_HELD", 2)
    async with speaking(tmp_path, {"max_body_bytes": 20_000}) as (job, _, ai, _):
        with ExitStack() as stack:
            sent = request(ai.api_key, asks("x" * 18_000), missing=5)
            for _ in range(2):
                stack.enter_context(connection(job.url, sent))
            await ask_until(ai, refused=True)
        await ask_until(ai, refused=False)  # their memory is free again


async def test_clients_that_read_a_byte_at_a_time_hold_up_nobody_and_nothing_is_lost(tmp_path):
    body = asks("z" * 300, stream=True, logprobs=True, top_logprobs=5)
    async with speaking(tmp_path) as (job, engine, ai, episode_id):
        with ExitStack() as stack:
            sent = request(ai.api_key, body)
            slow = [stack.enter_context(connection(job.url, sent, window=4096)) for _ in range(SLOW)]
            await until(lambda: job.plane.sessions.context.counts["calls"] == SLOW)
            for reader in slow:
                assert await asyncio.get_running_loop().sock_recv(reader, 1) == b"H"
            assert engine.running == 0
            await is_served(ai)
            assert len(await recorded(job, episode_id)) == SLOW + 1
        await until(lambda: job.plane.sessions.in_flight == 0)


async def test_a_client_that_takes_nothing_of_its_stream_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(respond, "STALLED_SECONDS", 0.2)
    content = json.dumps(asks("z" * 3000, stream=True)).encode()
    async with speaking(tmp_path, piece_delay_seconds=0.001) as (job, engine, ai, episode_id):
        headers = [(b"authorization", f"Bearer {ai.api_key}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("x", 1), "root_path": ""}
        bodies = asyncio.Queue[dict[str, Any]]()
        bodies.put_nowait({"type": "http.request", "body": content})

        async def takes_nothing(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async with asyncio.timeout(10):
            await app.create_app(job.plane)(scope, bodies.get, takes_nothing)
        assert (engine.running, job.plane.sessions.in_flight) == (0, 0)
        assert await recorded(job, episode_id) == ()
        await is_served(ai)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [["x"] * 10_000, ["x" * 10_000], [f"s{n}" for n in range(10_000)]], ids=len)
async def test_any_number_of_stop_strings_is_refused_at_once(tmp_path, stop):
    async with speaking(tmp_path) as (_, _, ai, _):
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await ai.chat.completions.create(**asks("text", stop=stop))
        assert str(caught.value.param).startswith("stop")
        await is_served(ai)


async def test_a_message_of_a_megabyte_is_over_the_context_and_broken_unicode_is_no_json(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, _), httpx2.AsyncClient() as http:
        with pytest.raises(openai.BadRequestError, match="context"):
            await ai.chat.completions.create(**asks("é" * 500_000))
        content = json.dumps(asks("a\ud800b")).encode()
        headers = {"authorization": f"Bearer {ai.api_key}"}
        answer = await http.post(f"{job.url}/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 422
        await is_served(ai)


HARD = {
    "a pattern of many repetitions": {"type": "string", "pattern": "(a{1,200}){1,200}"},
    "many brackets": {"type": "string", "pattern": "(" * 5000 + ")" * 5000},
    "many alternatives": {"anyOf": [{"type": "object", "properties": {f"k{n}": {"enum": [n]}}} for n in range(800)]},
    "a circle": {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}, "$ref": "#/$defs/x"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
async def test_a_schema_that_is_hard_to_compile_holds_up_nobody(tmp_path, name):
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": HARD[name]}}
    async with speaking(tmp_path) as (_, _, ai, _):
        asked = asyncio.ensure_future(ai.chat.completions.create(**asks("text"), response_format=wanted))
        await is_served(ai)
        async with asyncio.timeout(5):
            if name == "a pattern of many repetitions":
                assert (await asked).choices
            else:
                with pytest.raises((openai.UnprocessableEntityError, openai.BadRequestError), match="response_format"):
                    await asked
        await is_served(ai)
