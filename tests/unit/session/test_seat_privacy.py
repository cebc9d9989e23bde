"""Seats that one policy plays: none finds out by its own calls what another has said or seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palestra.session import EpisodeSession

from .conftest import call


@pytest.fixture
async def session(bench):
    bench.context = replace(bench.context, seats=frozenset({"white", "black"}))
    return await bench.session()


async def secret_call(session):
    return await session.generate_one(call("worth 3 1 1", agent="white", digest="white"))


@pytest.mark.parametrize("said", ["word for word", "its own words", "ids"])
async def test_what_another_seat_has_said_is_not_in_the_count_of_known_tokens(session, said):
    first = await secret_call(session)
    conversation = {
        "word for word": call("worth 3 1 1", first.reply.text, "?", agent="black"),
        "its own words": call("worth 3 1 1", "7", "?", agent="black"),
        "ids": call(prompt=tuple(int(i) for i in first.ids), messages=(), agent="black", digest="ids"),
    }[said]
    spy = await session.generate_one(conversation)
    assert (spy.shared, spy.parent, spy.fork) == (0, None, None)
    own = await session.generate_one(replace(conversation, agent="white/helper", digest="own"))
    assert own.shared >= first.prompt_tokens, "a seat's own calls, and those of its subagents, go on as ever"


async def test_it_stays_so_after_a_restart(bench, session):
    first = await secret_call(session)
    context = replace(bench.new_context(), seats=bench.context.seats)
    again = EpisodeSession(context, session.episode, await bench.recorded(session))
    spy = await again.generate_one(call("worth 3 1 1", first.reply.text, "?", agent="black"))
    assert (spy.shared, spy.parent) == (0, None)


async def test_agents_without_a_seat_go_on_from_one_another(session):
    first = await session.generate_one(call("a", agent="judge"))
    other = await session.generate_one(call("a", first.reply.text, "b", agent="clerk"))
    assert other.shared == first.tokens


async def test_the_seeds_of_seats_do_not_depend_on_which_worker_calls_first(bench, session):
    found = []
    for order in (("white", "black", ""), ("black", "", "white")):
        fresh = EpisodeSession(bench.context, session.episode, ())
        seeds = {}
        for seat in order:
            renderer = bench.context.policies.runtime("policy").renderer
            prompt = await fresh._prompts.build(call("same", agent=seat or "judge"), renderer, None)
            seeds[seat] = fresh._registry.reserve(prompt.digest)[1]
        found.append(seeds)
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 3


async def test_a_call_of_a_seat_whose_worker_left_is_the_same_sample_when_it_is_made_again(session):
    first = await secret_call(session)
    session.free_seed(first)
    session.delivered(first)
    again = await session.generate_one(call("worth 3 1 1", agent="white", digest="heir"))
    assert (again.reply, again.sampling.seed) == (first.reply, first.sampling.seed)
