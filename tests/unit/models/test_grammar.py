from __future__ import annotations

import pytest

from palestra.errors import InvalidRequest
from palestra.models import grammar
from palestra.models.causal_lm import load_tokenizer
from palestra.models.grammar import Grammars

WORDS = 'start: "ab" | "cd"\n'


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-random")


def test_matchers_of_one_grammar_do_not_know_of_each_other(tokenizer):
    grammars = Grammars(tokenizer, 260)
    one, other = grammars.matcher(WORDS), grammars.matcher(WORDS)
    before = other.bits().tolist()
    one.accept(tokenizer.encode("a")[0])
    assert one.bits().tolist() != before
    assert other.bits().tolist() == grammars.matcher(WORDS).bits().tolist() == before
    with pytest.raises(ValueError, match="does not fit"):
        one.accept(tokenizer.encode("c")[0])


def test_no_more_grammars_are_kept_than_a_fixed_number_and_the_last_used_stay(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar, "MOST_COMPILED", 3)
    grammars = Grammars(tokenizer, 260)
    for text in ("a", "b", "c", "a", "d"):
        grammars.matcher(f'start: "{text}"\n')
    assert [kept[8] for kept in grammars._compiled] == ["c", "a", "d"]


def test_what_can_not_be_compiled_is_refused_and_not_kept(tokenizer):
    grammars = Grammars(tokenizer, 260)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="can't be used"):
            grammars.matcher("start: nothing\n")
    assert not grammars._compiled
