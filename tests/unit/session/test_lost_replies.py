"""A reply that is lost in part, and does not come out the same again, begins anew, unless a client has some of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from palestra.errors import ReplyLost
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.session.registry import CallInFlight
from palestra.session.sampling import MOST_ATTEMPTS, sample_reply
from palestra.types.calls import PolicyVersion, SampledTokens, SamplingParams, TokenSequence


class Losing:
    """Loses its first replies after a token; every attempt has tokens of its own."""

    def __init__(self, lost):
        self.lost, self.attempts = lost, 0

    async def generate(self, request):
        self.attempts += 1
        attempt = self.attempts
        yield SampledTokens(ids=(ord("a") + attempt,), logprobs=(-1.0,), version=PolicyVersion(0, attempt))
        if attempt <= self.lost:
            raise ReplyLost("a reply was lost")
        yield SampledTokens(ids=(256,), logprobs=(-1.0,), version=PolicyVersion(0, attempt))


async def sampled(engine, tell=None):
    request = SimpleNamespace(
        policy="policy", stop=(), prompt=None, parallel_tool_calls=True, callable_tools=(), stop_ids=()
    )
    runtime = SimpleNamespace(engine=engine, renderer=ChatMLRenderer(ByteTokenizer()))
    call = CallInFlight(seed=1)
    call.request, call.runtime = request, runtime
    call.prompt = SimpleNamespace(sequence=TokenSequence(np.arange(40, 50, dtype=np.int32)))
    call.chat = SimpleNamespace(sampling=SamplingParams(temperature=1.0, max_tokens=8, seed=1), stop=None)
    await sample_reply(call, tell)
    return call.chat


async def test_all_of_a_reply_comes_from_the_attempt_that_was_not_lost():
    reply = await sampled(engine := Losing(2))
    assert engine.attempts == 3
    assert reply.completion_ids.tolist() == [ord("a") + 3, 256]
    assert [span.version for span in reply.versions] == [PolicyVersion(0, 3)]


async def test_a_reply_that_is_lost_again_and_again_fails():
    with pytest.raises(ReplyLost):
        await sampled(engine := Losing(100))
    assert engine.attempts == MOST_ATTEMPTS


async def test_what_a_client_has_is_not_taken_back():
    told = []
    with pytest.raises(ReplyLost):
        await sampled(engine := Losing(1), told.append)
    assert engine.attempts == 1
    assert len(told) == 1
