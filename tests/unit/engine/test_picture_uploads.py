"""Requests with pictures on their way to a vLLM server: how many are prepared at a time, and what is kept of them."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import numpy as np
import pytest
from aiohttp import web

from palestra.errors import NotFound
from palestra.types.calls import MediaSpan, SamplingParams, TokenSequence
from unit.building import engine_request
from unit.engine.engine_servers import ScriptedVllm, on_server

pytestmark = pytest.mark.ci

PROMPT = TokenSequence(np.arange(40, 44, dtype=np.int32), (MediaSpan(1, 2, "digest"),))
SAMPLING = SamplingParams(temperature=1.0, max_tokens=2, seed=3)
MIB = 1 << 20
SIZE = 32 * MIB  # of the pictures of a request


class LargePictures:
    """Takes the place of `VllmPictures`."""

    def __init__(self) -> None:
        self.prepared, self.missing = 0, False

    def features(self, prompt: TokenSequence, weights: str) -> dict[str, str]:
        assert prompt.media
        if self.missing:
            raise NotFound("there is no picture digest")
        self.prepared += 1
        return {"numbers": "a" * SIZE, "weights": weights}


class Unread(ScriptedVllm):
    """Reads the bodies of requests for replies when `reads` is set, and keeps none; answers when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.sizes = asyncio.Event(), list[int]()

    async def route(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/inference/v1/generate" or self.gate.is_set():
            return await super().route(request)
        await self.reads.wait()
        assert request.headers["content-type"] == "application/json"
        self.sizes.append(sum([len(piece) async for piece in request.content.iter_chunked(MIB)]))
        await self.gate.wait()
        return web.json_response({"error": {"message": "enough", "code": 400}}, status=400)


@pytest.fixture
def pictures() -> LargePictures:
    return LargePictures()


async def reply(engine) -> list[int]:
    request = engine_request(PROMPT.ids, SAMPLING, media=PROMPT.media)
    return [token async for piece in engine.generate(request) for token in piece.ids]


async def until(holds) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


async def test_what_arrives_is_the_prompt_with_its_pictures(tmp_path, pictures):
    server = ScriptedVllm()
    async with on_server(server, tmp_path, pictures=pictures) as engine:
        assert await reply(engine) == [100, 101]
    (body,) = server.bodies
    assert body["token_ids"] == PROMPT.ids.tolist()
    assert body["features"] == {"numbers": "a" * SIZE, "weights": "0.0"}
    assert body["stream"] is True
    assert "model" not in body


async def test_few_requests_are_prepared_and_none_is_kept_once_it_was_sent(tmp_path, pictures):
    server = Unread()
    async with on_server(server, tmp_path, pictures=pictures) as engine:
        await engine.check_servers()
        server.gate.clear()
        tracemalloc.start()
        try:
            calls = [asyncio.ensure_future(reply(engine)) for _ in range(4)]
            await until(lambda: pictures.prepared >= 2)
            await asyncio.sleep(0.3)
            assert pictures.prepared == 2, "the others wait until one was sent"
            server.reads.set()
            await until(lambda: len(server.sizes) == 4)
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert all(size > SIZE for size in server.sizes)
        assert kept < SIZE, f"{kept / MIB:.0f} MiB are kept of four requests of {SIZE / MIB:.0f} MiB"
        server.gate.set()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_request_that_can_not_be_prepared_or_is_given_up_keeps_no_place(tmp_path, pictures):
    server = Unread()
    async with on_server(server, tmp_path, pictures=pictures) as engine:
        await engine.check_servers()
        pictures.missing = True
        for _ in range(3):
            with pytest.raises(NotFound, match="no picture"):
                await reply(engine)
        pictures.missing = False
        server.gate.clear()
        calls = [asyncio.ensure_future(reply(engine)) for _ in range(2)]
        await until(lambda: pictures.prepared == 2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        server.reads.set()
        further = asyncio.ensure_future(reply(engine))
        await until(lambda: pictures.prepared == 3)
        server.gate.set()
        await asyncio.gather(further, return_exceptions=True)
