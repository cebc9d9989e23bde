"""A task that is a conversation has what a call over HTTP may have, and a reward that `/end_episode` takes."""

from __future__ import annotations

import pytest

from palestra.errors import ConfigError
from palestra.types.conversations import MAX_REPLIES, read_conversation
from palestra.types.records import Task

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TOOL = {"function": {"parameters": {"type": "object"}, "strict": True, "name": "f"}, "type": "function"}


def read(**data):
    return read_conversation(Task(task_id="t", data={"messages": TALK} | data))


@pytest.mark.parametrize("reward", ["nan", "inf", "1_0", "0.5", True, 1e308, -1.1e9, float("nan"), 10**18, None, [1]])
def test_a_reward_is_one_that_an_episode_may_have(reward):
    with pytest.raises(ConfigError, match=r"'t' is no conversation.*: reward: "):
        read(reward=reward)


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": "x"}],
        [{"type": "function", "function": {"name": {"a": 1}}}],
        [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"x": "y" * 70_000}}}],
        [{}],
        [[["type", "function"]]],
        "x",
        None,
        [TOOL] * 1001,
    ],
)
def test_tools_are_those_of_a_call(tools):
    with pytest.raises(ConfigError, match=r"'t' is no conversation.*: tools"):
        read(tools=tools)


def test_a_conversation_is_returned_as_it_was_given():
    messages, tools, reward = read(tools=[TOOL], reward=-3, other={"kept": "elsewhere"})
    assert [message.text for message in messages] == ["hi", "ho"]
    assert [list(tool) for tool in tools] == [["function", "type"]], "a template shows keys in their order"
    assert (list(tools[0]["function"]), reward) == (["parameters", "strict", "name"], -3.0)
    assert read()[1:] == ((), 1.0)


def test_the_replies_of_a_conversation_are_bounded():
    assert len(read(messages=TALK * MAX_REPLIES)[0]) == 2 * MAX_REPLIES
    with pytest.raises(ConfigError, match=r"'t' has 1,001 replies, and a conversation has at most 1,000; cut it"):
        read(messages=TALK * (MAX_REPLIES + 1))
