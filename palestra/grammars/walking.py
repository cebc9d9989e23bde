"""Compile a grammar and walk replies through it with `llguidance`, within the limits that count its steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from palestra.grammars.vocabulary import GrammarVocabulary


def make_tokenizer(vocabulary: GrammarVocabulary | None) -> LLTokenizer:
    """Return the tokenizer of a vocabulary; None: every byte is a token."""
    if vocabulary is None:
        return LLTokenizer("byte")
    return LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=vocabulary.eos)


def compile_grammar(tokenizer: LLTokenizer, grammar: str, lexer_states: int) -> LLMatcher:
    """Return a matcher for a new reply."""
    limits = LLParserLimits(max_lexer_states=lexer_states, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def walk_grammar(matcher: LLMatcher, tokens: Sequence[int], wanted: Collection[int]) -> Iterator[bytes]:
    """Accept tokens, and yield the token mask at each position in `wanted`; position i is before token i."""
    for place in range(len(tokens) + 1):
        if place in wanted:
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                raise ValueError(f"at a token of the reply: {matcher.get_error()}")
            yield mask
        if place < len(tokens) and not matcher.consume_token(tokens[place]):
            raise ValueError(f"token {tokens[place]} does not fit the grammar: {matcher.get_error()}")
