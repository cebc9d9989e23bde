"""Whatever others ask of an engine, a good request gets the tokens that it gets alone."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import engine_request
from unit.engine.calling import prompt, reply

from palestra.engine.embedded import engine as engine_module
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.errors import EngineFailure, InvalidRequest
from palestra.models.causal_lm import load_causal_lm
from palestra.types.calls import SAMPLING_RANGES, SamplingParams

GOOD = [
    (prompt(9 + 20 * seed, seed), SamplingParams(temperature=seed / 2, max_tokens=6, min_tokens=6, seed=seed, top_k=9))
    for seed in range(3)
]
WHOLE = st.one_of(st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30, 10**400]), st.integers(-(2**70), 2**70))
NUMBERS = st.one_of(WHOLE, st.floats())
TOKENS = st.one_of(st.integers(0, 258), WHOLE)
PROMPTS = st.one_of(
    st.lists(st.integers(0, 258), max_size=40),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
    st.lists(st.tuples(st.integers(0, 258), st.integers(0, 258)), max_size=3),
).map(lambda ids: np.array(ids, np.int32))
SAMPLING = st.fixed_dictionaries(
    {},
    optional={name: WHOLE if name in ("max_tokens", "seed") else NUMBERS for name in SAMPLING_RANGES}
    | {
        "stop_ids": st.lists(TOKENS, max_size=3).map(tuple),
        "logit_bias": st.lists(st.tuples(TOKENS, NUMBERS), max_size=3).map(tuple),
    },
)


@pytest.fixture(scope="module")
def engine():
    settings = EmbeddedEngineConfig.model_validate({"threads": 1, "dtype": "float32", "max_batch": 16})
    policy = PolicyModel(model=load_causal_lm("tiny-random", torch.float32), stop_ids=frozenset((258,)))
    made = EmbeddedEngine({"policy": policy}, settings)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def alone(engine):
    async def one_by_one():
        return [(await reply(engine, *asked))[0] for asked in GOOD]

    return asyncio.run(one_by_one())


async def play(engine, alone, odd) -> None:
    others = [asyncio.ensure_future(drained(engine, ids, how)) for ids, how in odd]
    good = [asyncio.ensure_future(reply(engine, *asked)) for asked in GOOD]
    assert [(await one)[0] for one in good] == alone
    for other in others:
        other.cancel()
    for error in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(error, asyncio.CancelledError | EngineFailure | InvalidRequest | None), error


async def drained(engine, ids, how) -> None:
    sampling = replace(SamplingParams(temperature=1.0, max_tokens=9, seed=0), **how)
    async with contextlib.aclosing(engine.generate(engine_request(ids, sampling))) as pieces:
        async for _ in pieces:
            pass


ODD = st.lists(st.tuples(PROMPTS, SAMPLING), min_size=1, max_size=4)


@examples(5, 200, deadline=None)
@given(odd=ODD)
def test_odd_requests_change_no_token_of_others(engine, alone, odd):
    asyncio.run(play(engine, alone, odd))


@examples(5, 200, deadline=None)
@given(odd=ODD)
def test_nor_do_they_where_no_number_is_checked(engine, alone, odd):
    odd = [(ids, how) for ids, how in odd if ids.size]  # an empty prompt is never computed, and so can't fail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "check_sampling", lambda *_: None)
        patch.setattr(engine_module, "check_prompt", lambda *_: None)
        asyncio.run(play(engine, alone, odd))
