from __future__ import annotations

from palestra.server.dialects.transcript import Transcript
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall, text_message


def test_the_parts_of_a_reply_become_one_message():
    out = Transcript()
    out.say("user", "a")
    out.think("hm")
    out.say("assistant", "let me see")
    out.call("c1", "f", "{}")
    out.call("c2", "g", '{"x": 1}')
    out.result("c1", "4")
    calls = tuple(
        ToolCall(id=i, function=FunctionCall(name=n, arguments=a))
        for i, n, a in (("c1", "f", "{}"), ("c2", "g", '{"x": 1}'))
    )
    reply = text_message("assistant", "let me see").model_copy(update={"reasoning_content": "hm", "tool_calls": calls})
    assert out.messages[1] == reply
    assert [message.role for message in out.messages] == ["user", "assistant", "tool"]
    assert out.messages[2].tool_call_id == "c1"


def test_replies_that_follow_one_another_stay_apart():
    out = Transcript()
    out.say("assistant", "one")
    out.say("assistant", "two")
    out.call("c", "f", "{}")
    out.think("hm")
    out.say("assistant", "three")
    texts = [(m.reasoning_content, m.text, len(m.tool_calls)) for m in out.messages]
    assert texts == [(None, "one", 0), (None, "two", 1), ("hm", "three", 0)]


def test_a_call_alone_and_reasoning_alone_are_replies():
    out = Transcript()
    out.call("c", "f", "{}")
    out.result("c", "4")
    out.think("")
    out.think("hm")
    assert [type(message) for message in out.messages] == [ChatMessage] * 3
    assert [(m.role, m.text, m.reasoning_content) for m in out.messages] == [
        ("assistant", "", None),
        ("tool", "4", None),
        ("assistant", "", "hm"),
    ]
