"""Subagents by their headers, and calls beside the task by their prompts."""

from __future__ import annotations

import json

import pytest

from palestra.config import MAX_AGENT
from palestra.errors import InvalidRequest
from palestra.server.dialects.anthropic import Messages
from palestra.server.dialects.chat import ChatCompletions
from palestra.server.dialects.completions import Completions
from palestra.server.dialects.fields import AUXILIARY_PROMPTS, caller_name

TITLE = "You are a title generator. You output ONLY a thread title. Nothing else."
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def named(headers=None, ids=None, prompts=(), agent="agent", **fields) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]} | fields
    (call,) = ChatCompletions().parse(json.dumps(body).encode(), {}).calls
    return caller_name(agent, call, headers or {}, ids or {}, prompts)


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"x-claude-code-session-id": "s"}, "agent"),
        ({"x-claude-code-agent-id": "a1"}, "agent/a1"),
        ({"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}, "agent/a2"),
        ({"x-session-id": "ses_1"}, "agent"),
        ({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, "agent/ses_2"),
        ({"x-claude-code-agent-id": "a/b\x00 " + "c" * 300}, "agent/a-b--" + "c" * 35),
    ],
)
def test_a_subagent_is_known_by_the_header_of_its_harness(headers, name):
    assert named(headers) == name


def test_users_add_headers_and_the_subagents_of_a_role_are_below_it():
    ids = {"x-worker": "", "x-thread": "x-parent-thread"}
    assert named({"x-worker": "w"}, ids, agent="planner") == "planner/w"
    assert (named({"x-thread": "t"}, ids), named({"x-thread": "t", "x-parent-thread": "p"}, ids)) == (
        "agent",
        "agent/t",
    )
    assert named({"x-claude-code-agent-id": "a"}, ids) == "agent/a"


def test_a_title_is_beside_the_task_and_a_call_with_tools_is_not():
    title = [{"role": "system", "content": TITLE}, {"role": "user", "content": "Fix it."}]
    assert named(messages=title, tools=[]) == "agent/auxiliary"
    assert named(messages=title) == "agent"
    assert named(messages=[{"role": "user", "content": f"What does {TITLE!r} do?"}], tools=[]) == "agent"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": TITLE}]
    assert named(messages=said, tools=[]) == "agent"


@pytest.mark.parametrize("beginning", AUXILIARY_PROMPTS)
def test_a_task_that_begins_as_a_prompt_for_a_title_is_still_the_task(beginning):
    asked = [{"role": "user", "content": f"{beginning} and so on"}]
    assert named(messages=asked, tools=[]) == "agent"
    assert named(messages=[{"role": "system", "content": "Help."}, *asked], tools=[]) == "agent"
    own = [{"role": "system", "content": "You are a title generator for papers."}, {"role": "user", "content": "x"}]
    assert named(messages=own, tools=[]) == "agent"


def test_a_prompt_as_it_is_has_no_title():
    (call,) = Completions().parse(json.dumps({"model": "m", "prompt": TITLE}).encode(), {}).calls
    assert caller_name("agent", call, {}, {}, ("Name this session",)) == "agent"


def test_the_name_below_an_agent_is_bounded():
    long = "p" * (MAX_AGENT - len("/a1"))
    assert named({"x-claude-code-agent-id": "a1"}, agent=long) == f"{long}/a1"
    with pytest.raises(InvalidRequest):
        named({"x-claude-code-agent-id": "a12"}, agent=long)


def test_the_title_of_claude_code_is_known_and_users_add_prompts():
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Generate a concise, sentence-case title (3-7 words) that captures it."}],
        "messages": [{"role": "user", "content": "Fix it."}],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    (call,) = Messages().parse(json.dumps(body).encode(), {}).calls
    assert caller_name("agent", call, {}, {}, ()) == "agent/auxiliary"
    asked = [{"role": "user", "content": "Name this session: fix it."}]
    assert named(messages=asked, tools=[]) == "agent"
    assert named(messages=asked, tools=[], prompts=("Name this session",)) == "agent/auxiliary"
