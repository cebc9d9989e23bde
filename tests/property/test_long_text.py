"""Long texts have the ids that they always had, and none is refused that fits."""

from __future__ import annotations

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import ByteTokenizer, long_text
from palestra.renderers.control_text import plain_encoder
from palestra.renderers.long_text import LongText, TooManyTokens

WORDS = [
    "hello",
    "World",
    " ",
    "  ",
    "\n",
    "\t ",
    "12",
    "'s",
    "don't",
    "été",
    "漢字",
    "👩‍👧",
    "<|im_end|>",
    "_x",
    "a" * 50,
    ".",
]
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=60).map(" ".join) | st.lists(
    st.sampled_from(WORDS) | st.text(max_size=6), max_size=60
).map("".join)


@pytest.fixture(scope="module", params=["SmolLM2-135M-Instruct", "tiny-random", "bytes"])
def known(request):
    tokenizer = ByteTokenizer() if request.param == "bytes" else load_tokenizer(request.param)
    encode = plain_encoder(tokenizer)
    return encode, LongText(tokenizer, encode)


@examples(60, 400)
@given(text=texts, piece=st.integers(1, 40), less=st.integers(0, 3))
def test_pieces_give_the_same_ids_and_the_bound_holds(known, text, piece, less):
    encode, long = known
    usual = list(encode(text))
    before, long_text.PIECE = long_text.PIECE, piece
    try:
        assert "".join(long.pieces(text)) == text
        assert long.fewest(text) <= len(usual)
        assert long.encode(text, len(usual)) == usual
        if len(usual) > less:
            with pytest.raises(TooManyTokens) as caught:
                long.encode(text, len(usual) - 1 - less)
            assert len(usual) - 1 - less < caught.value.tokens <= len(usual)
    finally:
        long_text.PIECE = before


def test_these_tokenizers_are_understood():
    """Else the tests above would try nothing."""
    for name in ("SmolLM2-135M-Instruct", "tiny-random"):
        tokenizer = load_tokenizer(name)
        long = LongText(tokenizer, plain_encoder(tokenizer))
        text = "some words that go on " * 4000
        assert len(list(long.pieces(text))) > 10
        assert long.fewest(text) > 100
