from __future__ import annotations

import pytest

from palestra.renderers.tool_calls import read_calls, write_call
from palestra.types.messages import ToolCall

GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def read(text: str):
    content, attempts = read_calls(text)
    return content, [(a.name, a.arguments, a.problem) for a in attempts]


@pytest.mark.parametrize(
    ("text", "content"), [(GOOD, ""), ("Hm.\n" + GOOD, "Hm."), ("Hm.\n\n" + GOOD, "Hm.\n"), (GOOD + " end", " end")]
)
def test_a_call_is_taken_out_of_the_content_with_the_line_break_before_it(text, content):
    assert read(text) == (content, [("f", '{"a": 1}', None)])


def test_parallel_calls_keep_their_order_and_leave_nothing():
    other = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    assert read(f"Both.\n{GOOD}\n{other}") == ("Both.", [("f", '{"a": 1}', None), ("g", "{}", None)])


@pytest.mark.parametrize(
    "written", ["{}", '{ "a":1 }', '{"a":"</tool_call>"}', '{"a": "é \\u00e9", "a": [1,2.50]}', '{"a":1e5}']
)
def test_arguments_are_as_the_model_wrote_them(written):
    assert read(f'<tool_call>{{"arguments":{written}, "name": "f"}}</tool_call>') == ("", [("f", written, None)])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
    ],
)
def test_arguments_may_be_missing_or_quoted(call, arguments):
    assert read(f"<tool_call>\n{call}\n</tool_call>")[1] == [("f", arguments, None)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "closed"),
        ('<tool_call>\n{"name": "f", "argu', "closed"),
        ('<tool_call>\n{"name": "f", "arguments": {}}', "missing after the object"),
        ('<tool_call>\n{"name": "f", "arguments": {}} and more\n</tool_call>', "missing after the object"),
        ("<tool_call>\nf(1)\n</tool_call>", "'{' is missing"),
        ('<tool_call>{"name": "f" "arguments": {}}</tool_call>', "',' is missing"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not a JSON object"),
        ('<tool_call>{"name": "f", "arguments": "none"}</tool_call>', "not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "no name"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "no name"),
        ("<tool_call>[]</tool_call>", "'{' is missing"),
        ('<tool_call>{1: 2}</tool_call>', "key"),
        ('<tool_call>{"name": "f", "arguments": ' + '{"a":' * 20000 + "</tool_call>", "deep"),
    ],
)  # fmt: skip
def test_what_is_no_call_has_a_reason_and_stays_in_the_content(text, problem):
    content, attempts = read_calls("Hm.\n" + text)
    assert content == "Hm.\n" + text
    (attempt,) = attempts
    assert problem in attempt.problem


def test_a_good_call_after_a_bad_one_is_still_found():
    bad = '<tool_call>\n{"name": "f", \n'
    content, calls = read(bad + GOOD)
    assert content == bad
    assert [problem is None for _, _, problem in calls] == [False, True]


def test_what_was_written_is_read_again():
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":  "</tool_call>"}'}}
    assert read(write_call(ToolCall.model_validate(call))) == ("", [("f", '{"a":  "</tool_call>"}', None)])
