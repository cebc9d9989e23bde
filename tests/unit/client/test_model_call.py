"""A model call of a worker that plays an environment: messages come back as they were, in as few bytes as can be."""

from __future__ import annotations

import json

import pytest

from palestra.client.model_call import ModelCall, ModelReply, model_call
from palestra.types.messages import ChatMessage, FunctionCall, TextPart, ToolCall, text_message
from unit.client.building import EPISODE

CALL = ToolCall(id="c1", function=FunctionCall(name="f", arguments="{}"))
MESSAGES = (
    text_message("user", "a"),
    ChatMessage(role="assistant", tool_calls=(CALL,), reasoning_content="r"),
    ChatMessage(role="tool", content=(TextPart(text="x"), TextPart(text="y")), tool_call_id="c1", name="f"),
    ChatMessage(role="user"),
)


def test_messages_arrive_as_they_were_and_what_is_not_asked_for_is_not_sent():
    call = model_call(EPISODE, ModelCall(policy="white", messages=MESSAGES, agent="señor/2", time_step=3))
    body = json.loads(call.body.model_dump_json())
    assert body.keys() == {"model", "messages", "return_token_ids", "logprobs"}
    assert body["messages"][0] == {"role": "user", "content": "a"}
    assert tuple(map(ChatMessage.model_validate, body["messages"])) == MESSAGES
    assert call.headers["x-palestra-agent"].decode() == "señor/2"
    assert call.headers["x-palestra-step"] == b"3"


def test_each_call_has_a_key_of_its_own():
    asked = ModelCall(policy="white", messages=MESSAGES, agent="agent")
    keys = {model_call(EPISODE, asked).headers["idempotency-key"] for _ in range(2)}
    assert len(keys) == 2


@pytest.mark.parametrize(("said", "meant"), [("length", "length"), ("tool_calls", "stop"), ("stop", "stop")])
def test_a_reply_names_its_record(said, meant):
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL.model_dump()]}
    answer = {
        "id": "chatcmpl-train-000001-00-2-7",
        "choices": [{"index": 0, "message": message, "finish_reason": said}],
    }
    reply = ModelReply.model_validate(answer)
    assert (reply.lease_and_index, reply.finish_reason) == ((2, 7), meant)
    assert reply.message.tool_calls == (CALL,)
