from __future__ import annotations

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.renderers.base import MessageDelta, whole_message
from palestra.renderers.chatml_reply import ReplySplitter

RENDERER = ChatMLRenderer(ByteTokenizer())
TOOLS = ({"type": "function", "function": {"name": "f"}},)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}{ \\" </tool_call> é"}}\n</tool_call>'
FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, '{"name": "g"', ', "arguments": {}}', "{", "}", '"'),
    *("\n", " ", "\\", "x", "é漢", "<", "<tool", "</thi", "[", "]", ":", "null", '{"name": "f"}', "\t", "\x85"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def in_pieces(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def split(pieces: list[str], calls: bool, single: bool = False) -> tuple[MessageDelta, int]:
    splitter = ReplySplitter(calls, "id", single)
    total = MessageDelta()
    for piece in pieces:
        total += splitter.feed(piece)
    return total + splitter.end(), splitter.malformed


@examples(100, 1500)
@given(text=texts, sizes=st.lists(st.integers(0, 7), max_size=60), calls=st.booleans())
def test_deltas_of_any_pieces_are_the_message_that_the_whole_text_is_read_as(text, sizes, calls):
    ids = np.asarray(ByteTokenizer().encode(text), np.int32)
    reply = RENDERER.parse(ids, lambda: ids, TOOLS if calls else (), "id")
    wanted = (whole_message(reply.message), len(reply.malformed))
    assert split(in_pieces(text, sizes), calls) == wanted
    assert split(list(text), calls) == wanted


@examples(60, 500)
@given(text=texts, sizes=st.lists(st.integers(0, 7), max_size=60))
def test_a_single_call_is_the_first_one_and_what_came_before_it(text, sizes):
    single, _ = split(in_pieces(text, sizes), calls=True, single=True)
    whole, _ = split([text], calls=True)
    assert single.calls == whole.calls[:1]
    assert whole.content.startswith(single.content)
    assert split(list(text), calls=True, single=True)[0] == single


@pytest.mark.parametrize(
    ("pieces", "first"),
    [
        (["Hello", " you"], MessageDelta(content="Hello")),
        (["<think>\nHm", " yes"], MessageDelta(reasoning="Hm")),
        ([CALL, " and"], MessageDelta(content="")),
        (["a <b"], MessageDelta(content="a <b")),
        (["a <tool_c"], MessageDelta(content="a ")),
    ],
)
def test_what_is_certain_goes_out_at_once(pieces, first):
    delta = ReplySplitter(True).feed(pieces[0])
    assert (delta.content, delta.reasoning) == (first.content, first.reasoning)


def test_a_call_goes_out_with_its_closing_tag_before_the_text_ends():
    splitter = ReplySplitter(True, "id")
    assert not splitter.feed(CALL[:-1])
    (call,) = splitter.feed(CALL[-1]).calls
    assert (call.id, call.function.name) == ("id_0", "f")
    assert splitter.calls == 1


def test_a_long_reply_takes_time_in_proportion():
    splitter = ReplySplitter(True)
    for piece in ["<tool_call>", *['{"a": "x'] * 20_000]:
        splitter.feed(piece)
    assert splitter.end().content.endswith("x")
