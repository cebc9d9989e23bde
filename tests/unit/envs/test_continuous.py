"""Worlds with a clock of their own, in virtual time: who thinks longer acts later, on what is true then."""

from __future__ import annotations

import asyncio
import time

import pytest

from palestra.envs.continuous import LoopClock, run_virtual
from palestra.errors import EpisodeOver
from palestra.types.messages import text_message
from unit.envs.harvest import Harvest

TAKE = text_message("assistant", "t")


async def played(environment, thinking):
    """(time, agent, what it saw) of each action; each agent thinks for its times one after another, then for ever."""
    left = {role: iter(times) for role, times in thinking.items()}
    loop, acted, rewards, turns = asyncio.get_running_loop(), [], {}, []

    async def turn(observation):
        await asyncio.sleep(next(left[observation.agent], 1e6))
        acted.append((round(loop.time(), 6), observation.agent, observation.content[0].text))
        environment.act(observation.id, TAKE)

    await environment.reset({})
    try:
        while True:
            observation = await environment.observe()
            rewards[observation.agent] = rewards.get(observation.agent, 0.0) + (observation.reward or 0.0)
            if not observation.is_last:
                turns.append(asyncio.ensure_future(turn(observation)))
    except EpisodeOver:
        for task in turns:
            task.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        return acted, rewards, round(loop.time(), 6)


def world(**changes):
    return Harvest(**{"tick_seconds": 1.0, "ticks": 20, "clock": LoopClock()} | changes)


def test_who_thinks_longer_acts_later_on_what_is_true_then():
    before = time.monotonic()
    acted, rewards, end = run_virtual(played(world(), {"agent-0": [2.5, 2.0], "agent-1": [10.25]}))
    assert acted == [(2.5, "agent-0", "0"), (4.5, "agent-0", "0"), (10.25, "agent-1", "0")]
    # By hand: 2 pieces at 2.5 s, 2 more at 4.5 s; the slow one finds the 6 that have ripened since.
    assert rewards == {"agent-0": pytest.approx(4 / 20), "agent-1": pytest.approx(6 / 20)}
    assert end == 20.0
    assert time.monotonic() - before < 10


def test_with_barriers_all_wait_for_the_slowest_and_share():
    acted, rewards, _ = run_virtual(played(world(barriers=True), {"agent-0": [2.5, 2.0], "agent-1": [10.25, 1.0]}))
    assert acted == [(2.5, "agent-0", "0"), (10.25, "agent-1", "0"), (11.25, "agent-1", "0"), (12.25, "agent-0", "0")]
    assert rewards == {"agent-0": pytest.approx(6 / 20), "agent-1": pytest.approx(6 / 20)}


def test_the_clock_goes_on_if_nobody_acts_and_the_episode_ends():
    acted, rewards, end = run_virtual(played(world(), {"agent-0": [], "agent-1": []}))
    assert (acted, rewards, end) == ([], {"agent-0": 0.0, "agent-1": 0.0}, 20.0)


def test_without_barriers_there_are_more_actions():
    thinking = {"agent-0": [0.75] * 30, "agent-1": [3.9] * 30}
    with_, without = (len(run_virtual(played(world(barriers=b), thinking))[0]) for b in (True, False))
    # By hand, in 20 s: five rounds of 3.9 s; without barriers 26 actions of the quick one and five of the slow one.
    assert (with_, without) == (2 * 5, 26 + 5)


def test_who_takes_too_few_pieces_spoils_them():
    acted, rewards, _ = run_virtual(played(world(least=3), {"agent-0": [2.5, 3.0], "agent-1": []}))
    assert [at for at, *_ in acted] == [2.5, 5.5]
    # By hand: 2 pieces at 2.5 s are too few; until 5.5 s 3 more have ripened.
    assert rewards["agent-0"] == pytest.approx(3 / 20)


@pytest.mark.parametrize("wrong", [{"ticks": 0}, {"tick_seconds": 0.0}, {"tick_seconds": -1.0}])
def test_a_world_without_time_is_refused(wrong):
    with pytest.raises(ValueError, match=r"least.*tick"):
        world(**wrong)


def test_fruit_is_taken_in_pieces():
    with pytest.raises(ValueError, match=r"0.*1.*piece"):
        world(least=0)
