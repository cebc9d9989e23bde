from __future__ import annotations

import math

from palestra.renderers import ByteTokenizer
from palestra.renderers.long_text import token_bytes
from palestra.server.dialects.answers import TokenTexts, chat_logprobs

BYTES = token_bytes(ByteTokenizer())
EURO = list("a€b".encode())


def test_half_a_character_has_its_own_bytes_and_is_written_as_openai_writes_it():
    content = chat_logprobs(EURO, [-1.0] * 5, [], BYTES)["content"]
    assert [entry["bytes"] for entry in content] == [[97], [0xE2], [0x82], [0xAC], [98]]
    assert [entry["token"] for entry in content] == ["a", "\\xe2", "\\x82", "\\xac", "b"]


def test_what_top_k_left_out_is_not_told_of():
    top = [((97, -0.1), (0xE2, -2.0), (5, -math.inf))]
    (entry,) = chat_logprobs([97], [-0.1], top, BYTES)["content"]
    assert [(e["bytes"], e["logprob"]) for e in entry["top_logprobs"]] == [([97], -0.1), ([0xE2], -2.0)]
    assert TokenTexts(BYTES).logprobs([97], [-0.1], top)["top_logprobs"] == [{"a": -0.1, "bytes:\\xe2": -2.0}]


def test_offsets_are_those_of_characters_also_where_they_come_in_pieces():
    texts = TokenTexts(BYTES)
    offsets = [n for token in EURO for n in texts.logprobs([token], [0.0], [])["text_offset"]]
    assert offsets == TokenTexts(BYTES).logprobs(EURO, [0.0] * 5, [])["text_offset"] == [0, 1, 1, 1, 2]
