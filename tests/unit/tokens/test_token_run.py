from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.tokens import TokenRun
from palestra.tokens.token_run import common_prefix
from palestra.types.calls import MediaSpan

TOKENS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, None, "a", "b"])), max_size=8)


def run_of(tokens) -> TokenRun:
    """A run as a prompt has it: ids, and a span for each stretch of one digest."""
    media: list[MediaSpan] = []
    for place, (_, digest) in enumerate(tokens):
        if digest is not None:
            media.append(MediaSpan(place, 1, digest))
    return TokenRun.of(np.array([token for token, _ in tokens], np.int32), media)


@given(TOKENS, TOKENS)
def test_tokens_are_the_same_where_ids_and_digests_are(a, b):
    common = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert run_of(a).common(run_of(b)) == run_of(b).common(run_of(a)) == common
    assert (run_of(a).key == run_of(b).key) == (a == b)
    assert not (a and b) or (run_of(a).first == run_of(b).first) == (a[0] == b[0])


@given(TOKENS, st.integers(0, 8), st.integers(0, 8), st.lists(st.integers(0, 2), max_size=3))
def test_parts_and_continuations_keep_their_digests(tokens, start, stop, more):
    part = run_of(tokens)[start:stop]
    assert part.key == run_of(tokens[start:stop]).key == part.copy().key
    longer = part.followed_by(np.array(more, np.int32))
    assert longer.key == run_of([*tokens[start:stop], *((token, None) for token in more)]).key


def test_a_span_covers_all_of_its_placeholders():
    ids = np.array([1, 9, 9, 9, 2], np.int32)
    run = TokenRun.of(ids, (MediaSpan(1, 3, "cat"),))
    assert run.digests is not None
    assert run.digests.tolist() == [None, "cat", "cat", "cat", None]
    assert run.common(TokenRun.of(ids, (MediaSpan(1, 2, "cat"), MediaSpan(3, 1, "dog")))) == 3
    assert run.common(TokenRun(ids)) == 1


@pytest.mark.parametrize("length", [0, 1, 500, 8192, 8193, 20_000])
@pytest.mark.parametrize("kind", [np.int32, np.int64, object])
def test_the_common_beginning_of_arrays_of_any_length_is_found(length, kind):
    array = np.arange(length).astype(kind)
    longer = np.concatenate((array, array[:1]))
    assert common_prefix(array, array.copy()) == common_prefix(array, longer) == common_prefix(longer, array) == length
    for place in {0, length // 2, length - 1} & set(range(length)):
        other = array.copy()
        other[place] = -1
        assert common_prefix(array, other) == common_prefix(longer, other) == place
