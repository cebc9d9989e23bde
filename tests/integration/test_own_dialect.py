"""A fifth dialect is one class: it plays an episode through the server that the others have, and inherits the rest."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from in_process import serving
from pydantic import BaseModel, ConfigDict

from palestra.http.bodies import parse_body
from palestra.http.errors import Failure
from palestra.http.server import listen, served, url_of
from palestra.runtime.local_job import LocalJob
from palestra.server import create_app
from palestra.server.dialects import DIALECTS, Dialect
from palestra.server.dialects.base import DialectRequest, EventWriter, TokenCounter
from palestra.server.dialects.fields import call_fields
from palestra.session import PolicyRuntime, ReplyPiece
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest, text_message
from palestra.types.records import Task


class Say(BaseModel):
    """What is said to a model."""

    model_config = ConfigDict(extra="forbid")

    model: str
    say: str
    live: bool = False


def read(body: bytes, headers: Mapping[str, str], path: str) -> DialectRequest[Say]:
    said = parse_body(Say, body)
    call = GenerationRequest(
        policy=said.model, messages=(text_message("user", said.say),), **call_fields(body, headers, path)
    )
    return DialectRequest(body=said, calls=(call,), stream=said.live)


class Lengths(TokenCounter[Say]):
    path = "/talk/length"
    body = Say
    description = "Count."

    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[Say]:
        return read(body, headers, self.path)

    def render(self, tokens: int) -> dict[str, Any]:
        return {"length": tokens}


class Talk(Dialect[Say]):
    path = "/talk"
    body = Say
    description = "Say something."
    counter = Lengths()

    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[Say]:
        return read(body, headers, self.path)

    def render(self, request: DialectRequest[Say], chats: Sequence[Chat], runtime: PolicyRuntime) -> dict[str, Any]:
        (chat,) = chats
        return {"answer": chat.reply.text, "read": chat.prompt_tokens}

    def sse(self, request: DialectRequest[Say], runtime: PolicyRuntime, created: float) -> EventWriter:
        return Words()

    def error_body(self, failure: Failure) -> dict[str, Any]:
        return {"sorry": failure.message}


class Words(EventWriter):
    def started(self, choice: int, chat: Chat) -> None:
        self.write({"read": len(chat.prompt_ids)}, "start")

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        if piece.delta.content:
            self.write({"word": piece.delta.content}, "word")

    def finished(self, choice: int, chat: Chat) -> None:
        self.write({"answer": chat.reply.text}, "end")


@asynccontextmanager
async def talking(folder: Path) -> AsyncIterator[tuple[LocalJob, httpx2.AsyncClient]]:
    """A job whose data plane also has the dialect of this file, on a port of its own."""
    async with serving(folder) as job:
        listener = listen("127.0.0.1", 0)
        async with (
            served(create_app(job.plane, (*DIALECTS, Talk())), listener),
            httpx2.AsyncClient(base_url=url_of(listener)) as http,
        ):
            yield job, http


async def claimed(job: LocalJob) -> tuple[str, int, dict[str, str]]:
    """An episode, its lease's number, and the headers that open it."""
    episode_id = await job.plane.store.episodes.register_adhoc(Task(task_id="t", data={}), "r")
    claim = await job.plane.store.episodes.claim("w", "c", None, episode_id)
    assert claim is not None
    fence = claim.fence
    return episode_id, fence, {"authorization": f"Bearer {job.plane.keys.episode_key(episode_id, fence)}"}


async def test_it_plays_an_episode(tmp_path):
    async with talking(tmp_path) as (job, http):
        episode_id, fence, key = await claimed(job)
        ask = {"model": "policy", "say": "hello"}
        length = (await http.post("/talk/length", json=ask, headers=key)).json()["length"]
        first = (await http.post("/talk", json=ask, headers=key | {"x-palestra-step": "3"})).json()
        streamed = await http.post("/talk", json=ask | {"live": True}, headers=key)
        end = {"episode_id": episode_id, "reward": 1.0}
        assert (await http.post("/end_episode", json=end, headers=key)).json()["state"] == "completed"
        chats = (await job.plane.store.calls.of_lease(episode_id, fence))[1]
    assert first == {"answer": chats[0].reply.text, "read": length}
    assert chats[0].time_step == 3
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in streamed.text.split("\n\n")[:-1]]
    assert [event["event"] for event in events] == ["start", *["word"] * (len(events) - 2), "end"]
    words = [json.loads(event["data"])["word"] for event in events[1:-1]]
    assert "".join(words) == json.loads(events[-1]["data"])["answer"] == chats[1].reply.text


@pytest.mark.parametrize("live", [False, True])
async def test_its_errors_have_its_form_wherever_they_happen(tmp_path, live):
    async with talking(tmp_path) as (job, http):
        episode_id, fence, key = await claimed(job)
        ask: dict[str, Any] = {"model": "policy", "say": "hello", "live": live}
        for body, headers, status in (
            (ask, {}, 401),
            (ask, {"authorization": f"Bearer {job.plane.keys.job_key}"}, 403),
            (ask | {"model": "other"}, key, 404),
            (ask | {"shout": True}, key, 422),
            (ask | {"say": "x" * 10_000_000}, key, 413),
            (ask | {"say": "x" * 100_000}, key, 400),  # read in a thread; the context is smaller
        ):
            answer = await http.post("/talk", json=body, headers=headers)
            assert (answer.status_code, list(answer.json())) == (status, ["sorry"])
        await job.plane.store.episodes.abort(episode_id, fence, "", discard=True)
        answer = await http.post("/talk", json=ask, headers=key)
        assert (answer.status_code, list(answer.json())) == (409, ["sorry"])
        document = (await http.get("/openapi.json")).json()
        assert {"/talk", "/talk/length"} <= document["paths"].keys()
