from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.server.dialects.responses import Responses
from unit.building import make_chat

RUNTIME = SimpleNamespace(
    renderer=SimpleNamespace(vocabulary=SimpleNamespace(bytes_of=lambda token: bytes([token % 256])))
)


def parse(**fields):
    body = json.dumps({"model": "m", "input": "hi"} | fields).encode()
    return Responses().parse(body, {})


def test_text_and_instructions_are_a_conversation():
    asked = parse(instructions="be brief", max_output_tokens=5, temperature=0.5, top_p=0.25)
    (call,) = asked.calls
    assert [(m.role, m.text) for m in call.messages] == [("system", "be brief"), ("user", "hi")]
    assert (call.max_tokens, call.temperature, call.top_p) == (5, 0.5, 0.25)
    assert not asked.stream


def test_items_are_messages_and_a_tool_has_the_shape_of_the_chat_dialect():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]},
    ]
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    choice = {"type": "function", "name": "f"}
    (call,) = parse(input=items, tools=[tool], tool_choice=choice, parallel_tool_calls=False).calls
    assert [(m.role, m.text, m.tool_call_id) for m in call.messages] == [
        ("user", "ab", None),
        ("assistant", "", None),
        ("tool", "4", "c"),
    ]
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert call.tools == ({"type": "function", "function": function},)
    assert (call.tool_choice, call.tool_name, call.parallel_tool_calls) == ("required", "f", False)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.message.content"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "function"}]}, "tools.0.function.name"),
    ],
)
def test_a_wrong_value_is_named(fields, place):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.field == place


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "prompt", "max_tool_calls"])
def test_what_would_have_to_be_kept_is_refused_by_name(field):
    with pytest.raises(UnsupportedField, match=field):
        parse(**{field: "x"})


def test_what_codex_sends_is_taken_and_tools_that_are_no_functions_are_left_out():
    tools = [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    ]
    asked = parse(
        tools=tools,
        client_metadata={"x-codex-installation-id": "1"},
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content"],
        store=False,
        prompt_cache_key="k",
    )
    asked.others.refuse_unknown()
    tools_left_out = ("tools.web_search", "tools.namespace", "tools.custom")
    assert asked.others.names == ("reasoning.effort", "reasoning.summary", "text.verbosity", *tools_left_out)
    assert [tool["function"]["name"] for tool in asked.calls[0].tools] == ["shell"]
    assert [tool["name"] for tool in asked.body.echo["tools"]] == ["shell"]


@pytest.mark.parametrize("fields", [{"reasoning": {"mode": "deep"}}, {"reasoning": "high"}, {"include": ["x"]}])
def test_an_unknown_key_of_a_wish_is_unknown(fields):
    with pytest.raises(UnsupportedField):
        parse(**fields).others.refuse_unknown()


def test_a_response_tells_of_the_reply_and_its_tokens():
    chat = make_chat(prompt=(1, 2, 3), completion=(104, 105, 258), reply="hi")
    result = (chat,)
    body = Responses().render(parse(tools=[{"type": "function", "name": "f"}]), result, RUNTIME)
    assert body["output"][0]["content"][0]["text"] == "hi"
    assert (body["usage"]["input_tokens"], body["usage"]["total_tokens"]) == (3, 6)
    assert body["tools"] == [{"type": "function", "name": "f"}]
