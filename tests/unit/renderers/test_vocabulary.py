from __future__ import annotations

import pytest

from palestra.renderers import ByteTokenizer

TOKENIZER = ByteTokenizer()


def test_every_byte_is_a_token():
    assert TOKENIZER.encode("aé") == [97, 0xC3, 0xA9]


def test_control_tokens_have_ids_that_text_can_not_produce():
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert [TOKENIZER.convert_tokens_to_ids(name) for name in names] == [256, 257, 258]
    assert max(TOKENIZER.encode("".join(names))) < 256
    assert TOKENIZER.vocab_size == 259
    assert TOKENIZER.convert_tokens_to_ids("<|tool|>") is None


def test_control_tokens_are_shown_or_skipped():
    ids = [257, 97, 258, 98, 256]
    assert TOKENIZER.decode(ids) == "<|im_start|>a<|im_end|>b<|endoftext|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "ab"


def test_bytes_that_are_no_text_become_replacement_characters():
    assert TOKENIZER.decode([0xC3]) == "\ufffd"
    assert TOKENIZER.decode([0xC3, 258, 0xA9]) == "\ufffd<|im_end|>\ufffd"
    assert TOKENIZER.decode([97, 259]) == "a\ufffd"


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\udcff\ud83d"])
def test_lone_surrogates_are_replaced(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == "".join("?" if "\ud800" <= c <= "\udfff" else c for c in text)
