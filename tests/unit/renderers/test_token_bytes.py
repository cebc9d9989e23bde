from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import ByteTokenizer
from palestra.renderers.long_text import token_bytes

NAMES = ["SmolLM2-135M-Instruct", "tiny-random", "bytes"]
TEXTS = ["€ and 漢字", "👩‍👩‍👧‍👦 family", "naïve\n\ttab", "\U0001f9ea", "ÿ\x00", " leading and trailing "]


def tokenizer_of(name: str):
    return ByteTokenizer() if name == "bytes" else load_tokenizer(name)


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request):
    return tokenizer_of(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_all_tokens_together_are_those_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(token_bytes(tokenizer), ids)) == text.encode()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_the_same_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(token_bytes(tokenizer), ids))
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids), "SmolLM2 has no token for some bytes"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_same_of_any_tokens_as_a_model_may_sample_them(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    joined = b"".join(map(token_bytes(tokenizer), ids))
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special_tokens=False)


def test_byte_fallback_and_spaces_of_sentencepiece():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "\u2581a": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert [token_bytes(tokenizer)(token) for token in (1, 2, 3, 4)] == [b" a", b"\xe2", b"\x82", b"\xac"]
