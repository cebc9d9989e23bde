"""Whatever is sent, the model's routes answer with a status below 500, and errors in the shape of their dialect."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palestra.chat import ByteTokenizer, ChatMLRenderer
from palestra.config import parse_config
from palestra.gateway import DataPlane, KeyRing, create_app
from palestra.grammars.pool import Grammars
from palestra.inference.scripted import ScriptedEngine, digits_script
from palestra.ledger import RunStore
from palestra.schemas.progress import JobProgress
from palestra.schemas.records import Task
from palestra.session import PolicyRuntime, SessionContext, Sessions

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


class Served:
    """The application, without a port, on an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        config = parse_config({"run_dir": str(folder), "engine": {"kind": "scripted"}})
        self.store = RunStore(folder / "run.db", config.rollout, config.store)
        self.grammars = Grammars()
        tokenizer = ByteTokenizer()
        renderer = ChatMLRenderer(tokenizer)
        runtime = PolicyRuntime(
            config=config.policy,
            renderer=renderer,
            engine=ScriptedEngine(digits_script(5, 258)),
            stop_ids=frozenset(renderer.get_stop_token_ids()),
            decode=tokenizer.decode,
            grammars=self.grammars,
        )
        context = SessionContext(store=self.store, policies={"policy": runtime}, seed=0)
        plane = DataPlane(
            config=config,
            store=self.store,
            sessions=Sessions(context, 8),
            keys=KeyRing(lambda: b"secret", "job"),
            progress=JobProgress(job="job", steps=1, run_dir=str(folder)),
            started_at=0.0,
        )
        self.app, self.key = create_app(plane), self.loop.run_until_complete(self._claim(plane))

    async def _claim(self, plane: DataPlane) -> str:
        name = await self.store.register_adhoc(Task(task_id="t", data={}), "r")
        claim = await self.store.claim("w", "c", 3600, name)
        assert claim is not None
        return plane.keys.episode_key(name, claim.episode.fence)

    async def _post(self, path: str, content: bytes) -> Any:
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=10) as http:
            return await http.post(path, content=content, headers={"x-api-key": self.key})

    def post(self, path: str, content: bytes) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(self._post(path, content), 10))

    def close(self) -> None:
        self.store.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.grammars.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Any]:
    made = Served(tmp_path_factory.mktemp("bodies"))
    yield SimpleNamespace(post=made.post)
    made.close()


def fine(path: str, answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code == 200:
        assert answer.content
        return
    body = answer.json()
    if path == "/v1/messages":
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body["error"].keys() == {"message", "type", "code", "param"}
    assert "internal" not in body["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_body_is_answered(served, path):
    assert served.post(path, json.dumps(BODIES[path]).encode()).status_code == 200


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("path", BODIES)
def test_a_body_in_which_anything_is_changed_is_answered(served, path, data):
    body = BODIES[path]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(list(places(body))))
        body = changed(body, place, data.draw(anything), data.draw(st.booleans()) and bool(place))
    fine(path, served.post(path, json.dumps(body).encode()))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=50), st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"\xff" * 9])))
@pytest.mark.parametrize("path", BODIES)
def test_bytes_of_any_kind_are_answered(served, path, content):
    answer = served.post(path, content)
    fine(path, answer)
    assert answer.status_code == 422
