"""Resources servers of NeMo Gym: tools in a session, the verifier's reward, and failures, none of which is a reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from openai.types.responses import Response as OpenAIResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from palestra.errors import EnvironmentFailed, InvalidEnvironment
from palestra.http.server import listen, served, url_of
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall
from palestra_inspect.environment_check import check_environment
from palestra_worlds import NemoGymEnvironment, nemo_gym
from unit.envs.playing import calls, play, says

TOOL = {
    "type": "function",
    "name": "increment",
    "description": "Count.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
}
TASK = {
    "id": "t",
    "responses_create_params": {"input": [{"role": "user", "content": "Count to 5."}], "tools": [TOOL]},
    "initial_count": 3,
    "expected_count": 5,
}


class Counter:
    """A resources server that counts, one counter a session; `fault` says what it does wrong."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.counts: dict[str, int] = {}
        self.verified: list[dict] = []

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_route("/seed_session", self.seed, methods=["POST"])
        app.add_route("/increment", self.increment, methods=["POST"])
        app.add_route("/verify", self.verify, methods=["POST"])
        return app

    async def seed(self, request: Request) -> Response:
        session = f"s{len(self.counts)}"
        assert "session" not in request.cookies
        self.counts[session] = (await request.json())["initial_count"]
        answer = JSONResponse({})
        answer.set_cookie("session", session)
        return answer

    async def increment(self, request: Request) -> Response:
        if self.fault == "slow":
            await asyncio.sleep(1.0)
        if self.fault == "large":
            return Response("x" * 10_000)
        given = await request.json()
        if self.fault == "counts":
            return JSONResponse({"given": str(given)[:20]})
        if "count" not in given:
            return JSONResponse({"detail": "count: Field required"}, 422)
        self.counts[request.cookies["session"]] += given["count"]
        return JSONResponse({"success": True})

    async def verify(self, request: Request) -> Response:
        body = await request.json()
        self.verified.append(body)
        if self.fault == "verifier":
            return Response("no judge", 500)
        reward = float(self.counts[request.cookies["session"]] == body["expected_count"])
        return Response(
            json.dumps({**body, "reward": float("nan") if self.fault == "nan" else reward, "steps": 2}),
            media_type="application/json",
        )


@contextlib.asynccontextmanager
async def counter(fault: str = "") -> AsyncIterator[tuple[Counter, str]]:
    server, listener = Counter(fault), listen("127.0.0.1", 0)
    async with served(server.app(), listener):
        yield server, url_of(listener)


async def played(environment: NemoGymEnvironment, *actions, task=TASK):
    left = iter(actions)
    try:
        return await play(environment, task, lambda observation: next(left))
    finally:
        await environment.close()


async def test_calls_in_a_session_then_the_verifiers_reward():
    async with counter() as (server, url):
        seen = await played(
            NemoGymEnvironment(url),
            calls(("increment", {"count": 1}), ("increment", {"count": 1}), text="two"),
            says("5"),
        )
    assert seen[0].content[0].text == "Count to 5."
    assert seen[0].tools[0]["function"]["parameters"] == TOOL["parameters"]
    assert [message.text for message in seen[1].content] == ['{"success":true}'] * 2
    assert (seen[2].reward, seen[2].terminated, seen[2].info["steps"]) == (1.0, True, 2)
    (body,) = server.verified
    assert (body["expected_count"], body["responses_create_params"]) == (5, TASK["responses_create_params"])
    # What OpenAI's own types say of the response that the verifier gets.
    said = OpenAIResponse.model_validate(body["response"], strict=False)
    assert [item.type for item in said.output] == [
        "message", "function_call", "function_call", "function_call_output", "function_call_output", "message",
    ]  # fmt: skip
    assert said.output_text == "two5"


@pytest.mark.slow
async def test_errors_of_tools_are_what_the_agent_reads():
    async with counter() as (server, url):
        seen = await played(
            NemoGymEnvironment(url, tool_seconds=0.3),
            calls(("increment", {}), ("verify", {}), ("divide", {})),
            says("3"),
        )
        shown = [message.text for message in seen[1].content]
        assert shown[0] == '{"detail":"count: Field required"}'
        assert shown[1] == '{"error": "there is no tool \'verify\'; known are increment"}'
        assert shown[2] == '{"error": "there is no tool \'divide\'; known are increment"}'
        assert seen[-1].reward == 0.0  # 3 is not 5, and the verifier says so
        server.fault = "slow"
        seen = await played(NemoGymEnvironment(url, tool_seconds=0.1), calls(("increment", {"count": 2})), says("5"))
        assert seen[1].content[0].text == '{"error": "increment took longer than 0.1 s"}'


async def test_arguments_that_can_not_be_sent_are_the_agents_errors():
    """A failure of the environment would have the episode played again, without a reward."""
    deep = "[" * 900 + "]" * 900
    written = ['{"count": NaN}', '{"count": 1e999}', f'{{"count": {deep * 1}}}', '{"count": "\\ud800"}', '{"count":']
    made = tuple(
        ToolCall(id=f"c{place}", function=FunctionCall(name="increment", arguments=text))
        for place, text in enumerate(written)
    )
    async with counter("counts") as (_, url):
        seen = await played(
            NemoGymEnvironment(url), ChatMessage(role="assistant", content=(), tool_calls=made), says("3")
        )
    shown = [message.text for message in seen[1].content]
    assert ["the arguments are not JSON" in text for text in shown] == [True, True, False, False, True]
    assert seen[-1].reward == 0.0


async def test_an_episode_that_is_cut_off_is_verified_with_what_was_said():
    async with counter() as (server, url):
        seen = await played(NemoGymEnvironment(url, max_steps=1), calls(("increment", {"count": 2})))
    assert (seen[-1].truncated, seen[-1].reward) == (True, 0.0)
    assert [item["type"] for item in server.verified[0]["response"]["output"]] == ["function_call"]


async def test_earlier_turns_and_instructions_are_shown():
    asked = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Count."}]},
            {"type": "function_call", "name": "increment", "arguments": "{}", "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "tools": [TOOL],
    }
    async with counter() as (_, url):
        seen = await played(NemoGymEnvironment(url), says("5"), task={**TASK, "responses_create_params": asked})
    assert [message.role for message in seen[0].content] == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("verifier", EnvironmentFailed, r"/verify.*500"),
        ("nan", EnvironmentFailed, "answers with"),
    ],
)
async def test_a_server_that_fails_fails_the_attempt(fault, kind, words, monkeypatch):
    monkeypatch.setattr(nemo_gym, "MAX_ANSWER_BYTES", 5_000)
    async with counter(fault) as (_, url):
        environment = NemoGymEnvironment(url)
        with pytest.raises(kind, match=words):
            await played(environment, calls(("increment", {"count": 1})), says("5"))


async def test_an_answer_that_is_too_long_is_an_error_that_the_agent_reads(monkeypatch):
    monkeypatch.setattr(nemo_gym, "MAX_ANSWER_BYTES", 5_000)
    async with counter("large") as (_, url):
        environment = NemoGymEnvironment(url)
        seen = await played(environment, calls(("increment", {"count": 1})), says("5"))
    assert "answers with more than 5,000 bytes" in seen[1].content[0].text


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"id": "t"}, "has `responses_create_params`"),
        ({"responses_create_params": {"input": []}}, "neither a text nor a list"),
        ({"responses_create_params": {"input": [{"type": "computer_call"}]}}, "'computer_call'"),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}},
            "'input_image'",
        ),
        (
            {"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}},
            "'web_search'",
        ),
    ],
)
async def test_a_task_that_is_none_of_nemo_gyms_says_so(task, words):
    with pytest.raises(InvalidEnvironment, match=words):
        await played(NemoGymEnvironment("http://127.0.0.1:1"), task=task)


async def test_a_server_that_is_not_there_or_is_another_one_says_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(EnvironmentFailed, match=rf"http://127.0.0.1:{port}.*reached"):
        await played(NemoGymEnvironment(f"http://127.0.0.1:{port}"))
    async with counter() as (_, url):
        with pytest.raises(EnvironmentFailed, match="NeMo"):
            await played(NemoGymEnvironment(f"{url}/elsewhere"))


async def test_it_keeps_to_what_environments_have_to_do():
    async with counter() as (_, url):
        await asyncio.to_thread(check_environment, lambda: NemoGymEnvironment(url), [TASK])
