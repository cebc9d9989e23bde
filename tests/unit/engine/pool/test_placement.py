"""Where a request goes: the worker with the least work, of which a known beginning is none."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.engine.pool.placement import (
    BLOCK_TOKENS,
    REQUEST_TOKENS,
    Candidate,
    PrefixIndex,
    block_hashes,
    place_request,
)
from palestra.types.calls import MediaSpan, PolicyVersion, TokenSequence

versions = st.builds(PolicyVersion, st.integers(0, 2), st.integers(0, 3))
candidates = st.lists(
    st.builds(
        Candidate, known=st.integers(0, 400), requests=st.integers(0, 8), version=versions, updating=st.booleans()
    ),
    min_size=1,
    max_size=5,
)


def one(known=0, requests=0, n=0, updating=False):
    return Candidate(known=known, requests=requests, version=PolicyVersion(0, n), updating=updating)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([one(known=16), one(known=160)], 1),  # the longest beginning
        ([one(requests=1), one()], 1),  # the least load
        ([one(n=3), one(n=4)], 1),  # the newest weights
        ([one(), one()], 0),
        ([one(known=160, requests=1), one()], 0),  # 160 tokens are worth one more request
        ([one(known=160, requests=3), one()], 1),  # and not three
        ([one(known=160, updating=True), one(requests=5)], 1),
        ([one(updating=True), one(known=16, updating=True)], 1),  # all take weights, as with `sync = "all"`
        ([one(known=REQUEST_TOKENS, requests=1), one()], 0),  # equal work: the longer beginning
    ],
)
def test_a_request_goes_to(found, wanted):
    assert place_request(200, found) == wanted


@examples(30, 300)
@given(candidates, st.integers(1, 500))
def test_no_worker_that_could_take_it_would_have_had_less_work(found, prompt_tokens):
    def work(each):
        return prompt_tokens - each.known + REQUEST_TOKENS * each.requests

    chosen = found[place_request(prompt_tokens, found)]
    free = [each for each in found if not each.updating]
    assert chosen.updating is not bool(free)
    rivals = free or found
    assert work(chosen) == min(map(work, rivals))
    equal = [each for each in rivals if work(each) == work(chosen)]
    assert chosen.known == max(each.known for each in equal)
    assert chosen.version == max(each.version for each in equal if each.known == chosen.known)


@examples(20, 200)
@given(candidates, st.integers(0, 4), st.integers(1, 500))
def test_more_load_never_attracts_a_request(found, number, prompt_tokens):
    chosen = place_request(prompt_tokens, found)
    number %= len(found)
    heavier = [
        Candidate(known=c.known, requests=c.requests + (i == number), version=c.version, updating=c.updating)
        for i, c in enumerate(found)
    ]
    if number != chosen:
        assert place_request(prompt_tokens, heavier) == chosen


@examples(30, 200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.lists(st.integers(0, 3), min_size=1, max_size=80))
def test_what_is_known_is_the_common_beginning_in_whole_blocks(first, second):
    index = PrefixIndex(4096)
    index.add("policy", block_hashes(TokenSequence(np.array(first, np.int32))))
    common = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))  # noqa: B905
    found = index.known("policy", block_hashes(TokenSequence(np.array(second, np.int32))))
    assert found == common // BLOCK_TOKENS * BLOCK_TOKENS


def test_two_images_are_never_the_same_beginning():
    ids = np.zeros(40, np.int32)
    index = PrefixIndex(4096)
    index.add("policy", block_hashes(TokenSequence(ids, (MediaSpan(20, 4, "cat"),))))
    assert index.known("policy", block_hashes(TokenSequence(ids, (MediaSpan(20, 4, "cat"),)))) == 32
    assert index.known("policy", block_hashes(TokenSequence(ids, (MediaSpan(20, 4, "dog"),)))) == 16
    assert index.known("policy", block_hashes(TokenSequence(ids))) == 16
    assert index.known("other", block_hashes(TokenSequence(ids))) == 0
    index.clear("policy")
    assert index.known("policy", block_hashes(TokenSequence(ids))) == 0


@pytest.mark.parametrize("length", [0, 5, 16, 40, 48])
def test_hashes_go_on_from_those_of_a_beginning(length):
    whole = TokenSequence(np.arange(100, 160, dtype=np.int32), (MediaSpan(20, 4, "cat"), MediaSpan(50, 4, "dog")))
    beginning = TokenSequence(whole.ids[:length], tuple(one for one in whole.media if one.start < length))
    known = block_hashes(beginning)
    assert len(known) == length // BLOCK_TOKENS
    assert block_hashes(whole, known) == block_hashes(whole)


def test_the_ends_of_old_sequences_are_forgotten_first():
    index = PrefixIndex(4 * BLOCK_TOKENS)
    long, other = (block_hashes(TokenSequence(np.full(48, value, np.int32))) for value in (1, 2))
    index.add("policy", long)
    index.add("policy", other)
    assert index.known("policy", other) == 48
    assert index.known("policy", long) == 16
