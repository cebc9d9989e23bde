"""Tools as Qwen2.5's template writes them. That the fixtures are what it writes is shown by `make conformance`."""

from __future__ import annotations

import json

import pytest
from conformance.fixtures import ADD, QWEN25, SYSTEM
from rendering import bridged, render_ids

from palestra.renderers import ByteTokenizer, ChatMLConfig, ChatMLRenderer

RENDERER = ChatMLRenderer(ByteTokenizer(), ChatMLConfig(default_system=SYSTEM, developer="system"))


def shown(ids) -> str:
    return ByteTokenizer().decode(ids)


@pytest.mark.parametrize("case", range(len(QWEN25)))
def test_conversations_are_written_as_qwens_template_writes_them(case):
    messages, tools, text = QWEN25[case]
    assert shown(render_ids(RENDERER, messages, tools=tools, add_generation_prompt=True)) == text


@pytest.mark.parametrize("case", [2, 3])
def test_arguments_as_json_text_are_the_same_as_arguments_as_objects(case):
    messages, tools, text = QWEN25[case]
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    assert shown(render_ids(RENDERER, messages, tools=tools, add_generation_prompt=True)) == text


@pytest.mark.parametrize("case", [2, 3])
def test_a_bridge_over_results_of_tools_is_the_rest_of_the_full_text(case):
    messages, tools, text = QWEN25[case]
    first = next(k for k, m in enumerate(messages) if m["role"] == "tool")
    head = shown(render_ids(RENDERER, messages[:first], tools=tools)).removesuffix("<|im_end|>\n")
    assert head + shown(bridged(RENDERER, [], [], messages[first:])) == text


def test_without_any_system_message_the_tools_stand_alone():
    bare = ChatMLRenderer(ByteTokenizer())
    assert shown(render_ids(bare, [{"role": "user", "content": "?"}], tools=[ADD])).startswith(
        "<|im_start|>system\n# Tools\n\nYou may call"
    )


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{ "a" :1}', '{ "a" :1}'), ("", '""'), ("[1]", '"[1]"'), ('{"a": 1', '"{\\"a\\": 1"'), ({"é": 1}, '{"é": 1}')],
)
def test_arguments_that_are_an_object_stand_as_written_and_anything_else_is_quoted(arguments, written):
    reply = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert f'"arguments": {written}}}\n</tool_call>' in shown(render_ids(RENDERER, [reply]))


def test_reasoning_that_comes_back_stands_before_the_answer():
    reply = {"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}
    assert shown(render_ids(RENDERER, [reply])).endswith("assistant\n<think>\n1 and 1\n</think>\n\n2<|im_end|>\n")
