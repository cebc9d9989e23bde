"""A task that is a conversation has what a call over HTTP may have, and a reward that `/end_episode` takes."""

from __future__ import annotations

import pytest

from palestra.errors import ConfigError
from palestra.types.conversations import MAX_REPLIES, read_conversations
from palestra.types.records import Task

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
OTHER = [TALK[0], {"role": "assistant", "content": "no"}]
SEEN = {"role": "user", "content": [{"type": "image", "digest": "00"}]}
TOOL = {"function": {"parameters": {"type": "object"}, "strict": True, "name": "f"}, "type": "function"}


def read(**data):
    (found,) = read_conversations(Task(task_id="t", data={"messages": TALK} | data), pairs=False)
    return found


@pytest.mark.parametrize("reward", ["nan", "inf", "1_0", "0.5", True, 1e308, -1.1e9, float("nan"), 10**18, None, [1]])
def test_a_reward_is_one_that_an_episode_may_have(reward):
    with pytest.raises(ConfigError, match=r"conversation.*reward"):
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
    with pytest.raises(ConfigError, match=r"'t'.*tools"):
        read(tools=tools)


def test_a_conversation_is_returned_as_it_was_given():
    found = read(tools=[TOOL], reward=-3, other={"kept": "elsewhere"})
    assert [message.text for message in found.messages] == ["hi", "ho"]
    assert [list(tool) for tool in found.tools] == [["function", "type"]], "a template shows keys in their order"
    assert (list(found.tools[0]["function"]), found.reward) == (["parameters", "strict", "name"], -3.0)
    assert (read().tools, read().reward, read().prompt) == ((), 1.0, 0)


def test_the_replies_of_a_conversation_are_bounded():
    assert len(read(messages=TALK * MAX_REPLIES).messages) == 2 * MAX_REPLIES
    with pytest.raises(ConfigError, match=r"'t'.*1,001.*1,000"):
        read(messages=TALK * (MAX_REPLIES + 1))


@pytest.mark.parametrize(
    ("data", "pairs"),
    [({"messages": [SEEN, *TALK]}, False), ({"prompt": [SEEN], "chosen": "a", "rejected": "b"}, True)],
)
def test_a_conversation_with_images_is_refused_because_no_call_would_have_them(data, pairs):
    with pytest.raises(ConfigError, match=r"'t'.*images"):
        read_conversations(Task(task_id="t", data=data), pairs=pairs)


def read_pair(**data):
    return read_conversations(Task(task_id="t", data=data), pairs=True)


@pytest.mark.parametrize(
    "data",
    [
        {"prompt": "hi", "chosen": "ho", "rejected": "no"},
        {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": OTHER[1:]},
        {"chosen": TALK, "rejected": OTHER},
        {"prompt": TALK[:1], "chosen": "ho", "rejected": OTHER[1:]},
        {"prompt": "hi", "chosen": TALK, "rejected": OTHER},  # as UltraFeedback
        {"prompt": TALK[:1], "chosen": TALK, "rejected": OTHER},
    ],
)
def test_a_pair_may_have_texts_or_messages_and_a_prompt_of_its_own_or_a_shared_one(data):
    chosen, rejected = read_pair(**data, tools=[TOOL], score_chosen=7)
    assert [message.text for message in chosen.messages] == ["hi", "ho"]
    assert [message.text for message in rejected.messages] == ["hi", "no"]
    assert [(side.prompt, side.reward, side.tools) for side in (chosen, rejected)] == [
        (1, 1.0, ({**TOOL},)),
        (1, 0.0, ({**TOOL},)),
    ]


def test_what_both_sides_say_first_is_their_prompt_and_is_not_learned():
    chosen, rejected = read_pair(chosen=[*TALK, *TALK], rejected=[*TALK, *OTHER])
    assert (chosen.prompt, rejected.prompt) == (3, 3)
    chosen, rejected = read_pair(prompt="hi", chosen=[*TALK, *TALK], rejected=[*TALK, *OTHER])
    assert (chosen.prompt, rejected.prompt) == (3, 3)
    longer, _ = read_pair(chosen=[*TALK, *TALK], rejected=OTHER)
    assert longer.prompt == 1, "two replies are learned"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "it has no `chosen`"),
        ({"prompt": "hi", "chosen": "ho"}, "it has no `rejected`"),
        ({"chosen": "ho", "rejected": "no"}, "it has no `prompt`"),
        ({"prompt": [], "chosen": "ho", "rejected": "no"}, "it has no `prompt`"),
        ({"prompt": "hi", "chosen": "ho", "rejected": "ho"}, "chosen and rejected are equal"),
        ({"prompt": 7, "chosen": "ho", "rejected": "no"}, "prompt: "),
        ({"prompt": "hi", "chosen": 7, "rejected": "no"}, "chosen: "),
        ({"prompt": "hi", "chosen": [], "rejected": "no"}, "role assistant in chosen"),
        ({"chosen": TALK, "rejected": TALK[:1]}, "role assistant in rejected"),
        ({"prompt": "hi", "chosen": "ho", "rejected": TALK[:1]}, "role assistant in rejected"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_reason(data, said):
    with pytest.raises(ConfigError) as refused:
        read_pair(**data)
    assert said in str(refused.value)
