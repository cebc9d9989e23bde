"""Compiles grammars with `llguidance`, within limits, and walks replies through them.

The limits of `llguidance` apply first: they count steps, so every machine refuses the same grammars. They do not cover
all of compilation, though: an intersection of patterns multiplies before it is counted. So a grammar is first compiled
in another process (`worker`), whose processor time and memory the kernel limits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from palestra.errors import GrammarRefused, InvalidRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarVocabulary:
    """The tokens of a mask's bits.

    Attributes:
        tokenizer: a fast tokenizer, as the JSON of its `tokenizer.json`.
        size: tokens of the model, V; may exceed the tokenizer's.
        eos: the token that ends a reply, if any.
    """

    tokenizer: str
    size: int
    eos: int | None


def vocabulary_of(tokenizer: Any, vocab_size: int) -> GrammarVocabulary:
    """Return the vocabulary for grammars from a tokenizer. `vocab_size` is the model's, which may exceed the
    tokenizer's.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return GrammarVocabulary(tokenizer=backend.to_str(), size=vocab_size, eos=tokenizer.eos_token_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The most that one grammar may use before it is refused.

    Attributes:
        compile_cpu_seconds: of compiling and a few random replies.
        compile_wall_seconds: of compiling on a busy machine.
        lexer_states: states of the lexer's automaton, about 2 kB each.
    """

    compile_cpu_seconds: float = 2.0
    memory_mib: int = 128
    compile_wall_seconds: float = 20.0
    lexer_states: int = 50_000


BOUNDS = Bounds()
# The trainer walks grammars that the engine has walked, so a grammar that was just inside the engine's bounds must not
# fail in the trainer. A repeated step has to give the same result, so it must not matter how busy the machine is.
TRAINER_BOUNDS = Bounds(compile_cpu_seconds=16.0, memory_mib=512, compile_wall_seconds=3600.0)


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


_LIMITS = ("fuel", "too many", "too large", "too complex", "unable to determine", "max is")  # in llguidance's errors


class Matcher:
    """A reply's position in its grammar. `Grammars.advance` updates the masks of many matchers together.

    Attributes:
        mask: int32 [ceil(V / 32)], little-endian, as bytes: one bit for each token that may follow.
    """

    def __init__(self, matcher: LLMatcher, mask: bytes) -> None:
        """Stand at the beginning of a reply. `mask` has the tokens with which a reply may begin."""
        self._matcher, self.mask = matcher, mask
        self.pending: list[int] = []
        self.closed = False

    def accept(self, token: int) -> None:
        """Append a token that the mask allows; `Grammars.advance` then checks it and computes the next mask."""
        self.pending.append(token)

    def advance(self) -> None:
        """Accept the pending tokens and renew the mask. Raises InvalidRequest: a token does not match the grammar, or
        is over a limit.
        """
        try:
            (self.mask,) = walk_grammar(self._matcher, self.pending, [len(self.pending)])
        except ValueError as error:
            raise refusal(str(error)) from None
        self.pending = []

    def walk(self, tokens: Sequence[int], wanted: Sequence[int], keep: bool = True) -> NDArray[np.int32]:
        """Return the masks at some places of a reply, int32 [W, B], from its beginning; see `Grammars.walk`."""
        masks = bytearray()  # writable, as torch wants it
        try:
            for mask in walk_grammar(self._matcher, tokens, frozenset(wanted)):
                masks += mask if keep else b""
        except ValueError as error:
            raise refusal(str(error)) from None
        return np.frombuffer(masks, "<i4").reshape(-1, len(self.mask) // 4)


def refusal(problem: str) -> InvalidRequest:
    """Return GrammarRefused if `llguidance` reports a limit, otherwise InvalidRequest."""
    text = " ".join(problem.replace("<non-verbose/>", "").split())
    text = text.rsplit("rror: ", 1)[-1].split("; consider")[0]  # without advice to the author of the grammar
    if "unable to determine" in text.lower():  # what follows is the whole regular expression
        return GrammarRefused("its patterns can't be intersected within the limit of llguidance")
    if any(word in text.lower() for word in _LIMITS):
        return GrammarRefused(text[:300])
    return InvalidRequest(text[:300])
