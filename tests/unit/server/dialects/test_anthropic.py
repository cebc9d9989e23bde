from __future__ import annotations

import json

import pytest

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.http.errors import Failure
from palestra.server.dialects.anthropic import Messages
from palestra.server.dialects.anthropic_blocks import blocks_of
from palestra.server.dialects.chat import ChatCompletions
from palestra.server.dialects.responses import Responses
from palestra.types.messages import text_message
from unit.building import make_chat


def asked(**fields):
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]} | fields
    return Messages().parse(json.dumps(body).encode(), {})


def parse(**fields):
    (call,) = asked(**fields).calls
    return call


def test_blocks_are_messages():
    turns = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "let me see", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    call = parse(messages=turns, system=[{"type": "text", "text": "s"}])
    assert [(m.role, m.text) for m in call.messages] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "let me see"),
        ("tool", "4"),
        ("user", "and?"),
    ]
    assert call.messages[2].reasoning_content == "hm"
    assert call.messages[2].tool_calls[0].function.arguments == '{"x": "é"}'
    assert call.messages[3].tool_call_id == "c"


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "none"}, ("none", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "f"}, ("required", "f", True)),
    ],
)
def test_a_tool_choice_is_that_of_the_chat_dialect(choice, wanted):
    call = parse(tool_choice=choice, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    assert (call.tool_choice, call.tool_name, call.parallel_tool_calls) == wanted
    assert call.tools == ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)


def test_how_to_sample_is_read():
    call = parse(temperature=0.5, top_p=0.25, top_k=4, stop_sequences=["x"])
    assert (call.max_tokens, call.temperature, call.top_p, call.top_k, call.stop) == (9, 0.5, 0.25, 4, ("x",))


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"top_k": 2**63}, "top_k"),
        ({"messages": []}, "messages"),
        ({"tools": [{}]}, "tools.0.name"),
    ],
)
def test_a_wrong_value_is_named(fields, place):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.field == place


@pytest.mark.parametrize("field", ["container", "mcp_servers"])
def test_what_is_not_supported_is_refused_by_name(field):
    with pytest.raises(UnsupportedField, match=field):
        parse(**{field: "x"})


def test_what_claude_code_sends_is_taken():
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    found = asked(
        context_management={"edits": edits},
        output_config={"effort": "high"},
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
    )
    found.others.refuse_unknown()
    assert found.others.names == ("output_config.effort",)
    assert not found.must_reason


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {"type": "clear_thinking_20251015"},
        {"type": "clear_tool_uses_20250919", "keep": "all"},
    ],
)
def test_an_edit_that_would_change_the_prompt_is_refused(edit):
    with pytest.raises(UnsupportedField):
        parse(context_management={"edits": [edit]})


def test_an_output_format_is_the_schema_of_the_reply():
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    assert parse(output_config={"format": {"type": "json_schema", "schema": schema}}).response_schema == schema


def test_reasoning_has_a_signature_so_that_clients_send_it_back():
    reply = text_message("assistant", "hi").model_copy(update={"reasoning_content": "hm"})
    assert blocks_of(reply)[0]["signature"]


def test_a_message_tells_of_the_reply_and_its_tokens():
    chat = make_chat(prompt=(1, 2, 3), completion=(104, 105, 258), reply="hi")
    body = Messages().render(asked(), (chat,), None)
    assert body["content"] == [{"type": "text", "text": "hi"}]
    assert (body["stop_reason"], body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == ("end_turn", 3, 3)


def test_an_error_has_the_shape_of_its_dialect_and_keeps_what_is_internal():
    refused = Messages().error_body(Failure(status=429, message="m", code="c"))
    assert refused["error"] == {"type": "rate_limit_error", "message": "m", "code": "c"}
    assert ChatCompletions().error_body(Failure.of(UnsupportedField("m", "f")))["error"]["param"] == "f"
    for dialect in (Messages(), Responses()):
        assert "secret" not in str(dialect.error_body(Failure.of(RuntimeError("secret"))))
