"""Whatever is sent, the model's routes answer with a status below 500, and errors in the shape of their dialect."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from drawing import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from palestra.config import parse_config
from palestra.engine.fake import FakeEngine, digits_script
from palestra.grammars.pool import Grammars
from palestra.http.bodies import _PIECE, _count, _outside_strings
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.server import DataPlane, KeyRing, create_app
from palestra.session import PolicyRuntime, PolicySet, SessionContext, Sessions
from palestra.store import open_run_store
from palestra.types.progress import JobProgress
from palestra.types.records import Task

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
ASK = {"role": "user", "content": [{"type": "text", "text": "a"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c"}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "stop": ["x"],
        "n": 2,
        "logit_bias": {"5": 1},
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 7,
        "max_tokens": 5,
        "min_tokens": 1,
        "stop_token_ids": [9],
    },
    "/v1/completions": {
        "model": "policy",
        "prompt": [[1, 2], "a"],
        "n": 2,
        "stop": "x",
        "logprobs": 2,
        "stream": True,
        "max_tokens": 4,
    },
    "/v1/responses": {
        "model": "policy",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "instructions": "b",
        "tools": [{"type": "function"} | TOOL],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "stream": True,
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "b"}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "stop_sequences": ["x"],
        "stream": True,
    },
}
anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["", "\ud800", "\0", "<|im_end|>", "auto", "policy", "x" * 20_000, "{", "</tool_call>"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], new: Any, drop: bool) -> Any:
    if not path:
        return new
    body = copy.deepcopy(body)
    place = body
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return body


Headers = list[tuple[bytes, bytes]]


class Served:
    """The application, without a port, on an event loop of its own."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine(digits_script(5, 258))
        self.loop = asyncio.new_event_loop()
        config = parse_config({"run_dir": str(folder), "engine": {"kind": "fake"}})
        self.store = open_run_store(folder / "run.db", config.rollout)
        self.grammars = Grammars()
        tokenizer = ByteTokenizer()
        renderer = ChatMLRenderer(tokenizer)
        runtime = PolicyRuntime(
            name="policy",
            config=config.policies["policy"],
            renderer=renderer,
            engine=self.engine,
            grammars=self.grammars,
        )
        context = SessionContext(store=self.store, policies=PolicySet.of(config, {"policy": runtime}), seed=0)
        plane = DataPlane(
            config=config,
            store=self.store,
            sessions=Sessions(context, 8),
            keys=KeyRing(lambda: b"secret", "job"),
            progress=JobProgress(job="job", steps=1, run_dir=str(folder)),
            started_at=0.0,
        )
        self.job_key = plane.keys.job_key
        self.app, self.key = create_app(plane), self.loop.run_until_complete(self._claim(plane))

    async def _claim(self, plane: DataPlane) -> str:
        name = await self.store.episodes.register_adhoc(Task(task_id="t", data={}), "r")
        claim = await self.store.episodes.claim("w", "c", 3600, name)
        assert claim is not None
        return plane.keys.episode_key(name, claim.fence)

    async def _ask(self, method: str, path: str, content: bytes, headers: Headers) -> Any:
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=10) as http:
            return await http.request(method, path, content=content, headers=headers)

    def ask(self, method: str, path: str, content: bytes, headers: Headers) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(self._ask(method, path, content, headers), 10))

    def post(self, path: str, content: bytes) -> Any:
        return self.ask("POST", path, content, [(b"x-api-key", self.key.encode())])

    def close(self) -> None:
        self.store.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.grammars.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Any]:
    made = Served(tmp_path_factory.mktemp("bodies"))
    yield SimpleNamespace(post=made.post, ask=made.ask, key=made.key, job_key=made.job_key)
    made.close()


def fine(path: str, answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code == 200:
        assert answer.content or path == "/events"
        return
    body = answer.json()
    if path == "/v1/messages":
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message", "code"}
    else:
        assert body["error"].keys() == {"message", "type", "code", "param"}
    assert "internal" not in body["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_body_is_answered(served, path):
    assert served.post(path, json.dumps(BODIES[path]).encode()).status_code == 200


@examples(30, 300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("path", BODIES)
def test_a_body_in_which_anything_is_changed_is_answered(served, path, data):
    body = BODIES[path]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(list(places(body))))
        body = changed(body, place, data.draw(anything), data.draw(st.booleans()) and bool(place))
    fine(path, served.post(path, json.dumps(body).encode()))


@examples(15, 100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=50), st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"\xff" * 9])))
@pytest.mark.parametrize("path", BODIES)
def test_bytes_of_any_kind_are_answered(served, path, content):
    answer = served.post(path, content)
    fine(path, answer)
    assert answer.status_code == 422


NUMBERS = [
    b"9" * 5000,
    b"-" + b"9" * 5000,
    b"1e5",
    b"0x1",
    b"nan",
    b"\xd9\xa1",
    b" 7 ",
    b"",
    b"00000000007",
    b"1_0",
    b"1.0",
]
header_values = st.one_of(
    st.sampled_from(NUMBERS), st.binary(max_size=20), st.integers(-(2**70), 2**70).map(lambda n: b"%d" % n)
)
READ = (
    "x-palestra-step",
    "x-palestra-agent",
    "x-stainless-retry-count",
    "last-event-id",
    "content-length",
    "content-type",
)
EPISODES = {
    "/heartbeat_episode": {"episode_id": "e"},
    "/end_episode": {"episode_id": "e", "reward": 1.0},
    "/abort_episode": {"episode_id": "e"},
    "/claim_episode": {"request_id": "r"},
    "/register_episode": {"request_id": "r", "task": {"data": {}}},
    "/tasks": {"chunk_id": "c", "tasks": []},
}


@pytest.mark.slow
@examples(30, 300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([*BODIES, *EPISODES]),
    headers=st.dictionaries(st.sampled_from(READ), header_values, min_size=1, max_size=3),
    job=st.booleans(),
)
def test_headers_of_any_kind_are_answered(served, path, headers, job):
    key = served.job_key if job else served.key
    raw = [(name.encode(), value) for name, value in headers.items()] + [(b"x-api-key", key.encode())]
    answer = served.ask("POST", path, json.dumps((BODIES | EPISODES)[path]).encode(), raw)
    fine(path, answer)
    assert answer.headers.get("x-should-retry") != "true"


@examples(25, 200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(after=header_values, last=st.none() | header_values)
def test_numbers_of_a_query_of_any_kind_are_answered(served, after, last):
    headers = [(b"x-api-key", served.job_key.encode())] + ([] if last is None else [(b"last-event-id", last)])
    answer = served.ask("GET", f"/events?follow=false&after={quote(after)}", b"", headers)
    fine("/events", answer)


@examples(25, 200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), path=st.sampled_from(list(EPISODES)))
def test_a_body_of_an_episode_route_in_which_anything_is_changed_is_answered(served, path, data):
    body = EPISODES[path]
    place = data.draw(st.sampled_from(list(places(body))))
    body = changed(body, place, data.draw(anything), data.draw(st.booleans()) and bool(place))
    key = served.key if "episode_id" in EPISODES[path] else served.job_key
    answer = served.ask("POST", path, json.dumps(body).encode(), [(b"x-api-key", key.encode())])
    fine(path, answer)
    assert answer.headers.get("x-should-retry") != "true"


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "policy", "zz": [' + b"[]," * 1_300_000 + b"[]]}",
        b'{"model": "policy", "messages": [' + b"{}," * 1_300_000 + b"{}]}",
        b'{"model": "policy", "prompt": [' + b"1," * 1_900_000 + b"1]}",
    ],
    ids=["lists", "objects", "numbers"],
)
@pytest.mark.parametrize("path", BODIES)
def test_bodies_of_millions_of_values_are_refused_before_they_are_built(served, path, content):
    answer = served.post(path, content)
    assert answer.status_code == 422
    assert "more than" in answer.json()["error"]["message"]


@given(st.recursive(st.none() | st.text('a"\\,[]{}:', max_size=6), lambda i: st.lists(i, max_size=4), max_leaves=12))
def test_values_are_counted_as_json_has_them(value):
    def containers(v: Any) -> int:
        return 1 + sum(map(containers, v)) if isinstance(v, list) else 0

    def commas(v: Any) -> int:
        return max(len(v) - 1, 0) + sum(map(commas, v)) if isinstance(v, list) else 0

    body = json.dumps(value).encode()
    outside = b"".join(_outside_strings(body))
    assert _count(outside, b"[{") == containers(value)
    assert _count(outside, b",") == commas(value)
    # An escape or a quote may stand where a piece ends.
    longer = b'["' + b"\\\\" * (_PIECE // 2) + b'", ' + body + b"]"
    for start in (b"", b" "):
        outside = b"".join(_outside_strings(start + longer))
        assert _count(outside, b"[{") == containers(value) + 1
