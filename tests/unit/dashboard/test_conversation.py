"""A recorded call as a conversation: what a client of OpenAI's chat completions would have sent."""

from __future__ import annotations

import pytest

from palestra.dashboard.conversation import read_call
from palestra.errors import Conflict, NotFound
from palestra.types.messages import ChatMessage, FunctionCall, ImagePart, TextPart, ToolCall, text_message
from unit.building import make_chat
from unit.dashboard.recorded import record


async def test_it_has_all_messages_of_the_prompt_and_then_the_reply(tmp_path):
    run = await record(tmp_path)
    found = read_call(run, "train-000000-00", 1)
    assert [(one["role"], one["content"]) for one in found.messages] == [
        ("user", "hello"),
        ("assistant", "reply"),
        ("user", "go on"),
        ("assistant", "ABC"),
    ]
    assert (found.policy, found.temperature, found.max_tokens, found.notes) == ("policy", 1.0, 16, [])
    assert len(read_call(run, "train-000000-00", 0).messages) == 2
    with pytest.raises(NotFound, match="2 calls"):
        read_call(run, "train-000000-00", 2)


async def test_tool_calls_and_their_answers_are_as_openai_has_them_and_images_are_left_out(tmp_path, monkeypatch):
    run = await record(tmp_path)
    call = ToolCall(id="c1", function=FunctionCall(name="add", arguments='{"a": 1}'))
    messages = (
        ChatMessage(role="user", content=(TextPart(text="look"), ImagePart(digest="0" * 64))),
        ChatMessage(role="assistant", tool_calls=(call,), reasoning_content="so"),
        ChatMessage(role="tool", content=(TextPart(text="2"),), tool_call_id="c1"),
    )
    _answer(monkeypatch, make_chat(messages=messages, tools=({"type": "function", "function": {"name": "add"}},)))
    found = read_call(run, "train-000000-00", 0)
    assert found.messages[:3] == [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "so",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assert found.messages[3] == {"role": "assistant", "content": text_message("assistant", "reply").text}
    assert found.tools == [{"type": "function", "function": {"name": "add"}}]
    assert "images" in found.notes[0]


async def test_a_prompt_of_tokens_is_no_conversation(tmp_path, monkeypatch):
    run = await record(tmp_path)
    _answer(monkeypatch, make_chat(messages=()))
    with pytest.raises(Conflict, match="token ids"):
        read_call(run, "train-000000-00", 0)


def _answer(monkeypatch, chat) -> None:
    """Let the episode have another call than the recorded ones."""
    from palestra.dashboard import conversation

    class View:
        class trajectory:
            chats = (chat,)

    monkeypatch.setattr(conversation, "read_episode", lambda connection, name: View)
