from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from palestra.renderers import ByteTokenizer, PackageRenderer
from palestra.types.messages import ChatMessage, text_message
from unit.building import ids

HELLO = text_message("user", "hello")
BACK = text_message("assistant", "hi")
MORE = text_message("user", "more")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'


def never():
    raise AssertionError("the prompt was asked for")


def shown(tokens: Any) -> str:
    return ByteTokenizer().decode(tokens.tolist())


def encoded(text: str):
    return ids(*text.encode(), 258)


def test_a_prompt_is_the_whole_conversation_with_an_open_turn(byte_renderer):
    prompt = byte_renderer.render((HELLO, BACK, MORE)).ids
    assert prompt.dtype == np.int32
    assert shown(prompt) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_everything_a_message_has_reaches_the_renderer(byte_renderer):
    said = ChatMessage.model_validate(
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}],
        }
    )
    answer = ChatMessage.model_validate({"role": "tool", "content": "2", "tool_call_id": "c"})
    text = shown(byte_renderer.render((HELLO, said, answer), TOOLS).ids)
    assert json.dumps(TOOLS[0]) in text
    assert f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>" in text


def test_a_bridge_of_ours_is_what_follows_and_never_asks_for_the_prompt(byte_renderer):
    rest = byte_renderer.extend(never, ids(0xC3, 258), (MORE,)).ids
    assert rest.dtype == np.int32
    assert shown(rest) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert shown(byte_renderer.extend(never, ids(0xC3), (BACK, MORE)).ids).startswith(
        "<|im_end|>\n<|im_start|>assistant\nhi"
    )


class Package:
    """What the package makes: a renderer in its sense."""

    config = SimpleNamespace(name="gpt-oss")  # of which no text has to be marked

    def __init__(self, ids_after: list[int] | None = None, parsed: ParsedResponse | None = None) -> None:
        self.ids_after, self.parsed, self.given = ids_after, parsed, SimpleNamespace()

    def render_ids(self, messages, *, tools=None, add_generation_prompt=False):
        self.given = SimpleNamespace(messages=messages, tools=tools)
        return [1]

    def bridge_to_next_turn(self, prompt, completion, messages, *, tools=None):
        self.given = SimpleNamespace(prompt=prompt, completion=completion, messages=messages, tools=tools)
        return None if self.ids_after is None else SimpleNamespace(token_ids=self.ids_after)

    def parse_response(self, token_ids, *, tools=None, prompt_ids=None):
        return self.parsed

    def get_stop_token_ids(self):
        return [9]


def wrapped(package: Package) -> PackageRenderer:
    return PackageRenderer(ByteTokenizer(), package)


@pytest.mark.parametrize(
    ("whole", "rest"),
    [
        (None, None),
        ([1, 2, 3, 9, 5, 6], [5, 6]),
        ([1, 2, 3, 9], []),
        ([1, 2, 3, 8, 5], None),
        ([1, 2], None),
        ([], None),
    ],
)
def test_of_the_package_only_an_exact_bridge_is_taken(whole, rest):
    package = Package(whole)
    renderer = wrapped(package)
    found = renderer.extend(lambda: ids(1, 2), ids(3, 9), (MORE,), TOOLS)
    assert (None if found is None else found.ids.tolist()) == rest
    assert package.given.prompt == [1, 2]
    assert package.given.completion == [3, 9]
    assert package.given.messages == [{"role": "user", "content": "more"}]
    assert package.given.tools == TOOLS


def answer(call: str) -> ChatMessage:
    return text_message("tool", "2").model_copy(update={"tool_call_id": call})


def test_a_tools_answer_is_told_which_tool_it_is_of():
    """Some formats show the name, which OpenAI's tool messages do not have."""
    parsed = ParsedResponse(
        content="", tool_calls=[ParsedToolCall(raw="", name="add", arguments={}), ParsedToolCall(raw="", name="now")]
    )
    package = Package(None, parsed)
    renderer = wrapped(package)
    renderer.extend(lambda: ids(1), ids(9), (answer("x_1"), answer("x_0"), answer("other"), answer("x_7")), TOOLS)
    assert [m.get("name") for m in package.given.messages] == ["now", "add", None, None]
    said = renderer.parse(ids(9), lambda: ids(1), TOOLS, "x").message
    renderer.render((HELLO, said, answer("x_1")), TOOLS)
    assert package.given.messages[2]["name"] == "now"


def test_no_tools_are_none_for_the_package():
    package = Package()
    renderer = wrapped(package)
    renderer.render((HELLO,))
    assert package.given.tools is None


def test_a_reply_is_an_assistants_message(byte_renderer):
    reply = byte_renderer.parse(encoded("ok"), never)
    assert reply.message == text_message("assistant", "ok")
    assert reply.malformed == ()


def test_calls_of_a_reply_get_ids_and_keep_their_arguments(byte_renderer):
    reply = byte_renderer.parse(encoded(f"<think>\nhm\n</think>\n\nSo.\n{CALL}\n{CALL}"), never, TOOLS, "call_e1")
    assert reply.message.text == "So."
    assert reply.message.reasoning_content == "hm"
    assert [c.id for c in reply.message.tool_calls] == ["call_e1_0", "call_e1_1"]
    assert {(c.function.name, c.function.arguments) for c in reply.message.tool_calls} == {("add", '{"a":  1}')}
    assert reply.malformed == ()


def test_without_tools_a_call_is_text(byte_renderer):
    assert byte_renderer.parse(encoded(CALL), never).message == text_message("assistant", CALL)


def test_each_malformed_call_has_a_reason_and_the_good_ones_are_counted_alone(byte_renderer):
    bad = "<tool_call>\nadd(1)\n</tool_call>"
    reply = byte_renderer.parse(encoded(f"{bad}\n{CALL}\n{bad}"), never, TOOLS)
    assert [c.id for c in reply.message.tool_calls] == ["call_0"]
    assert reply.message.text == f"{bad}\n{bad}"
    assert [reason[:12] for reason in reply.malformed] == ["tool call 0:", "tool call 2:"]


@pytest.mark.parametrize(
    ("raw", "value", "arguments"),
    [
        ('{"name": "add", "arguments": {"a":  1}}', {"a": 1}, '{"a":  1}'),
        ('{"name": "add", "parameters": {"a":1}}', {"a": 1}, '{"a":1}'),
        ("<function=add>", {"a": "é"}, '{"a": "é"}'),
        ('{"arguments": {"a": 2}}', {"a": 1}, '{"a": 1}'),  # the package read something else there
        ("", '{"a":1}', '{"a":1}'),
        ("", None, "{}"),
    ],
)
def test_the_packages_calls_are_as_the_model_wrote_them_where_it_wrote_json(raw, value, arguments):
    package = Package(
        parsed=ParsedResponse(content="", tool_calls=[ParsedToolCall(raw=raw, name="add", arguments=value)])
    )
    renderer = wrapped(package)
    reply = renderer.parse(ids(9), lambda: ids(1), TOOLS)
    assert [c.function.arguments for c in reply.message.tool_calls] == [arguments]


@pytest.mark.parametrize(
    "call",
    [
        ParsedToolCall(raw="<bad>", status=ToolCallParseStatus.INVALID_JSON),
        ParsedToolCall(raw="<bad>", name="add", arguments="text"),
        ParsedToolCall(raw="<bad>", name="add", arguments={"a": float("nan")}),
        ParsedToolCall(raw="<bad>", name="add", arguments=[1]),
    ],
)
def test_a_call_that_the_package_could_not_read_stays_in_the_content(call):
    package = Package(parsed=ParsedResponse(content="So.", reasoning_content="", tool_calls=[call]))
    renderer = wrapped(package)
    reply = renderer.parse(ids(9), lambda: ids(1), TOOLS)
    assert reply.message == text_message("assistant", "So.\n<bad>")
    assert len(reply.malformed) == 1


def test_without_tools_the_packages_calls_are_text_too():
    call = ParsedToolCall(raw="<call>", name="add", arguments={})
    reply = wrapped(Package(parsed=ParsedResponse(content="", tool_calls=[call]))).parse(ids(9), lambda: ids(1))
    assert reply.message == text_message("assistant", "<call>")
    assert reply.malformed == ()
