from __future__ import annotations

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.renderers import ByteTokenizer
from palestra.renderers.text_stream import TextStream

TOKENIZER = ByteTokenizer()
STOP = 258


def streamed(ids: list[int], decode=TOKENIZER.decode) -> list[str]:
    stream = TextStream(decode, {STOP})
    return [*map(stream.add, ids), stream.end()]


@examples(60, 500)
@given(st.lists(st.one_of(st.integers(0, 258), st.sampled_from([0xE6, 0xBC, 0xA2, 0xF0, 0x9F, 0xFF])), max_size=80))
def test_together_it_is_the_text_of_all_ids_without_stop_tokens_at_the_end(ids):
    while ids and ids[-1] == STOP:
        ids.pop()
    assert "".join(streamed([*ids, STOP])) == TOKENIZER.decode(ids)


def test_a_character_goes_out_with_its_last_token():
    assert streamed([*"é漢".encode(), 97]) == ["", "é", "", "", "漢", "a", ""]


def test_bytes_that_are_no_characters_do_not_pile_up():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return TOKENIZER.decode(ids)

    assert "".join(streamed([0xFF] * 1000, decode)) == "\ufffd" * 1000
    assert longest < 60


def test_a_tokenizer_that_drops_a_leading_space_keeps_those_between_words():
    words = {1: "▁one", 2: "▁two", 3: "s"}

    def decode(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert streamed([1, 3, 2], decode) == ["one", "s", " two", ""]


@pytest.mark.parametrize("ids", [[], [STOP], [STOP, STOP]])
def test_nothing_is_no_text(ids):
    assert "".join(streamed(ids)) == ""
