from __future__ import annotations

import json

import pytest

from palestra.chat import ByteTokenizer
from palestra.errors import InvalidRequest, UnsupportedField
from palestra.gateway.chat_api import completion, parse_chat
from palestra.schemas.messages import text_message
from unit.building import make_chat

MESSAGES = [{"role": "user", "content": "hi"}]


def parse(headers=None, **fields):
    return parse_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode(), headers or {})[0]


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
        ("n", 2),
        ("stream", True),
        ("top_p", 0.9),
        ("tool_choice", "required"),
        ("stop", ["x"]),
        ("presence_penalty", 0.5),
        ("response_format", {"type": "json_object"}),
        ("no_such_field", 1),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(UnsupportedField, match=field) as caught:
        parse(**{field: value})
    assert caught.value.field == field


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
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_chat(body, {})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": None, "audio": {"id": "1"}},
    ],
)
def test_what_is_not_text_is_refused_and_never_dropped(message):
    with pytest.raises(UnsupportedField):
        parse(messages=[message])


def test_a_completion_has_openais_shape_with_a_logprob_a_token():
    chat = make_chat(prompt=(1, 2, 3), completion=(104, 105, 258), logprobs=[-0.5, -1.0, -2.0], reply="hi")
    body = completion(chat, ByteTokenizer().decode)
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hi", "stop")
    assert [(t["token"], t["logprob"]) for t in choice["logprobs"]["content"]] == [
        ("h", -0.5),
        ("i", -1.0),
        ("<|im_end|>", -2.0),
    ]
    assert body["usage"]["total_tokens"] == 6
    assert completion(chat, None)["choices"][0]["logprobs"] is None
