"""Any schema compiles within the bounds or is refused within them, and so does every token of a reply."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palestra.errors import InvalidRequest
from palestra.grammars.matcher import BOUNDS
from palestra.grammars.pool import Grammars
from palestra.session.request import constraint_of
from palestra.types.messages import GenerationRequest

# Smaller than a server's, so that many examples take seconds; what is bounded is the same.
SMALL = replace(BOUNDS, compile_cpu_seconds=0.5, memory_mib=64)
PATIENCE = 60.0  # of wall time: the machine may be busy
many = st.sampled_from([3, 20, 300, 3000])
huge = st.sampled_from([2, 100, 10**4, 10**6, 10**9])
atoms = st.sampled_from(["a", "b{3}", "[^a]", ".", r"\d", r"\w", "(a|b|ab)", r"\p{L}", "x.*y", "(|a)"])


@st.composite
def patterns(draw: Any, depth: int = 3) -> str:
    """Regular expressions with nested quantifiers, alternations, and searches in the middle of a text."""
    if depth == 0:
        return str(draw(atoms))
    kind = draw(st.sampled_from(["atom", "repeat", "or", "search", "concat"]))
    inner = draw(patterns(depth - 1))
    if kind == "repeat":
        low = draw(st.integers(0, 5))
        return f"({inner}){draw(st.sampled_from(['*', '+', f'{{{low},{low + draw(st.integers(0, 300))}}}']))}"
    if kind == "or":
        return "|".join(f"({inner}{i})" for i in range(draw(st.integers(1, 60))))
    if kind == "search":
        return f".*{inner}.*"
    return f"({inner})({draw(patterns(depth - 1))})" if kind == "concat" else inner


@st.composite
def schemas(draw: Any) -> Any:
    """What was seen to take for ever, and its neighbours."""
    kind = draw(st.sampled_from(sorted(_KINDS)))
    return _KINDS[kind](draw)


def _all_of(draw: Any) -> Any:
    count = draw(st.integers(2, 300))
    pattern = draw(patterns())
    letters = [chr(97 + i % 26) for i in range(count)]
    return {"allOf": [{"type": "string", "pattern": f".*{letter}{pattern}{letter}.*"} for letter in letters]}


def _nested(draw: Any) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(draw(st.sampled_from([3, 60, 300]))):
        schema = draw(st.sampled_from([{"type": "array", "items": schema}, {"properties": {"a": schema}}]))
    return schema


def _references(draw: Any) -> Any:
    count = draw(st.integers(2, 60))
    names = [f"#/$defs/d{i}" for i in range(count)]
    last = draw(st.sampled_from([{"type": "null"}, {"$ref": names[0]}]))
    wide = {
        f"d{i}": {"type": "object", "properties": {k: {"$ref": names[i + 1]} for k in "abc"}} for i in range(count - 1)
    }
    return {"$ref": names[0], "$defs": wide | {f"d{count - 1}": last}}


def _objects(draw: Any) -> Any:
    properties = {f"p{i}": draw(st.just({"type": "integer"})) for i in range(draw(many))}
    required = draw(st.sampled_from([0, 1, len(properties)]))
    return {"type": "object", "properties": properties, "required": list(properties)[:required]}


_KINDS: dict[str, Any] = {
    "allOf": _all_of,
    "pattern": lambda draw: {"type": "string", "pattern": draw(patterns(4))},
    "multipleOf": lambda draw: {"type": "integer", "multipleOf": draw(st.integers(1, 10**6))},
    "multiples": lambda draw: {"allOf": [{"type": "integer", "multipleOf": m} for m in draw(_divisors)]},
    "enum": lambda draw: {"enum": [f"{i}-{i * i}" for i in range(draw(many) * 3)]},
    "nested": _nested,
    "references": _references,
    "objects": _objects,
    "length": lambda draw: {"type": "string", draw(st.sampled_from(["minLength", "maxLength"])): draw(huge)},
    "items": lambda draw: {"items": {"type": "null"}, draw(st.sampled_from(["minItems", "maxItems"])): draw(huge)},
    "anyOf": lambda draw: {
        "anyOf": [{"properties": {f"a{i}": {"pattern": draw(atoms)}}} for i in range(draw(many) // 3)]
    },
    "names": lambda draw: {"patternProperties": {draw(patterns()): {"type": "null"}}, "additionalProperties": False},
    "numbers": lambda draw: {"type": "number", "minimum": draw(st.floats()), "maximum": draw(st.floats())},
    "whitespace": lambda draw: {"type": "object", "x-guidance": {"whitespace_pattern": draw(patterns())}},
}
_divisors = st.lists(st.integers(2, 2000), min_size=2, max_size=6)


def calls() -> st.SearchStrategy[GenerationRequest]:
    choices = many.flatmap(lambda n: st.just(tuple(f"choice {i} {'x' * (i % 7)}" for i in range(n * 3))))
    return st.one_of(
        schemas().map(lambda schema: GenerationRequest(policy="p", response_schema=schema)),
        schemas().map(
            lambda schema: GenerationRequest(
                policy="p",
                tools=({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}},),
                tool_choice="required",
            )
        ),
        choices.map(lambda texts: GenerationRequest(policy="p", response_choices=texts)),
    )


class Bench:
    """Grammars on an event loop of their own."""

    def __init__(self) -> None:
        from palestra.renderers import ByteTokenizer, ChatMLRenderer

        self.loop = asyncio.new_event_loop()
        self.grammars, self.renderer = Grammars(bounds=SMALL), ChatMLRenderer(ByteTokenizer())
        self.verdicts: dict[bool, int] = {True: 0, False: 0}

    def close(self) -> None:
        self.grammars.close()
        self.loop.close()

    async def sample(self, call: GenerationRequest, seed: int) -> None:
        """A reply of random tokens that fit; each step is bounded."""
        constraint = constraint_of(call, self.renderer)
        await self.grammars.check(*constraint)
        matcher = await self.grammars.matcher(constraint.grammar)
        draw = random.Random(seed)
        try:
            for _ in range(40):
                allowed = [i for i in range(len(matcher.mask) * 8) if matcher.mask[i >> 3] >> (i & 7) & 1]
                assert allowed, "a reply that can't go on"
                matcher.accept(draw.choice(allowed))
                if matcher.pending[-1] > 255:
                    return
                (error,) = self.grammars.advance([matcher])
                if error is not None:
                    raise error
        finally:
            self.grammars.release(matcher)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.mark.slow
def test_every_grammar_is_used_or_refused_within_the_bounds(bench: Bench) -> None:
    present = psutil.Process()
    held_before = present.memory_info().rss  # of this process, in which other tests have run
    others = set(present.children(recursive=True))  # which those tests have started

    @given(calls(), st.integers(0, 99))
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def any_grammar(call: GenerationRequest, seed: int) -> None:
        began, refused = time.monotonic(), None
        try:
            bench.loop.run_until_complete(bench.sample(call, seed))
        except InvalidRequest as error:
            refused = error
        bench.verdicts[refused is None] += 1
        if refused is not None:
            assert refused.http_status in (400, 422)
            assert not refused.retryable
            assert "\n" not in str(refused)
        assert time.monotonic() - began < PATIENCE
        assert present.memory_info().rss - held_before < 2**28
        for child in set(present.children(recursive=True)) - others:
            assert child.memory_info().rss < (64 + 150) * 2**20

    any_grammar()
    assert min(bench.verdicts.values()) > 10, "the examples are of both kinds"
