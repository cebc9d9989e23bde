from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.server.dialects.anthropic import Messages
from palestra.server.dialects.chat import ChatCompletions
from palestra.types.messages import text_message
from unit.building import make_chat

MESSAGES = [{"role": "user", "content": "hi"}]


def asked(headers=None, **fields):
    body = json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()
    return ChatCompletions().parse(body, headers or {})


def parse(headers=None, **fields):
    (call,) = asked(headers, **fields).calls
    return call


def test_what_is_acted_on_is_read():
    call = parse(max_tokens=5, temperature=0.5, seed=7)
    assert (call.policy, call.messages) == ("m", (text_message("user", "hi"),))
    assert (call.max_tokens, call.temperature, call.seed, call.retry) == (5, 0.5, 7, False)


def test_the_newer_name_of_max_tokens_wins():
    assert parse(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_a_negative_seed_is_made_one_of_63_bits():
    assert 0 <= parse(seed=-1).seed < 2**63
    assert parse(seed=-1).seed != parse(seed=-2).seed


@pytest.mark.parametrize(("count", "retry"), [("0", False), ("1", True), ("2", True), ("", False)])
def test_a_retry_is_known_by_the_openai_clients_header(count, retry):
    assert parse({"x-stainless-retry-count": count}).retry is retry


def test_equal_bodies_have_equal_digests_and_others_others():
    assert parse().digest == parse().digest
    assert parse(seed=1).digest != parse().digest


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "stream": False, "top_p": 1, "tools": [], "logit_bias": {}, "response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": 1}, "stop": None, "functions": None, "tool_choice": "auto"},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "top_logprobs": 0, "modalities": ["text"]},
    ],
)
def test_fields_that_ask_for_nothing_are_harmless(fields):
    assert parse(**fields).policy == "m"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("repetition_penalty", 1.1),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("enable_thinking", False),
        ("regex", "a+"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(UnsupportedField, match=field) as caught:
        parse(**{field: value})
    assert caught.value.field == field


def test_a_wish_without_effect_is_named():
    fields = {"reasoning_effort": "low", "verbosity": "high", "prediction": {"type": "content", "content": "x"}}
    others = asked(**fields, user="me").others
    others.refuse_unknown()
    assert others.names == tuple(fields)


def test_an_unknown_field_is_known_to_the_server_by_its_name():
    others = asked(no_such_field=1, reasoning_effort="low").others
    assert others.names == ("reasoning_effort", "no_such_field")
    with pytest.raises(UnsupportedField, match=r"no_such_field.*server\.unknown_fields") as caught:
        others.refuse_unknown()
    assert caught.value.field == "no_such_field"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"model": None}, "model"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"min_tokens": 10**30}, "min_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop.0"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_a_wrong_value_is_named(fields, place):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.field == place
    assert not isinstance(caught.value, UnsupportedField)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}']
)
def test_what_is_no_json_is_an_invalid_request(body):
    with pytest.raises(InvalidRequest, match="JSON"):
        ChatCompletions().parse(body, {})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": None, "audio": {"id": "1"}},
    ],
)
def test_what_is_not_text_is_refused_and_never_dropped(message):
    with pytest.raises(UnsupportedField):
        parse(messages=[message])


def test_a_completion_has_openais_shape_with_a_logprob_a_token():
    chat = make_chat(prompt=(1, 2, 3), completion=(104, 105, 258), logprobs=[-0.5, -1.0, -2.0], reply="hi")
    result = (chat,)
    runtime = SimpleNamespace(renderer=ChatMLRenderer(ByteTokenizer()))
    body = ChatCompletions().render(asked(logprobs=True, return_token_ids=True), result, runtime)
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hi", "stop")
    assert [(t["token"], t["logprob"]) for t in choice["logprobs"]["content"]] == [
        ("h", -0.5),
        ("i", -1.0),
        ("<|im_end|>", -2.0),
    ]
    assert body["usage"]["total_tokens"] == 6
    assert (body["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [104, 105, 258])
    plain = ChatCompletions().render(asked(), result, runtime)
    assert plain["choices"][0]["logprobs"] is None
    assert "prompt_token_ids" not in plain


def test_all_of_the_dialect_comes_to_the_call():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = parse(
        n=3,
        stop="END",
        top_p=0.5,
        top_k=7,
        min_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "3": 1.5},
        logprobs=True,
        top_logprobs=4,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
        stop_token_ids=[5],
    )
    assert (call.choices, call.stop, call.stop_ids) == (3, ("END",), (5,))
    assert (call.top_p, call.top_k, call.min_tokens, call.top_logprobs) == (0.5, 7, 2, 4)
    assert (call.presence_penalty, call.frequency_penalty) == (0.5, -0.5)
    assert call.logit_bias == ((3, 1.5), (7, -100.0))
    assert (call.tools, call.tool_choice, call.tool_name) == ((tool,), "required", "f")
    assert not call.parallel_tool_calls
    assert call.response_schema == {"type": "array"}


@pytest.mark.parametrize(("sent", "schema"), [("text", None), ("json_object", {"type": "object"})])
def test_a_response_format_is_a_schema(sent, schema):
    assert parse(response_format={"type": sent}).response_schema == schema


def test_equal_bodies_of_different_routes_are_different_requests():
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 5}).encode()
    digests = {dialect.parse(body, {}).calls[0].digest for dialect in (ChatCompletions(), Messages())}
    assert len(digests) == 2
