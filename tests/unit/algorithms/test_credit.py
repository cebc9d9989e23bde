"""Credit by examples in numbers; tests/property/test_credit.py has the invariants."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from palestra.algorithms.baselines import centred_returns, group_advantages
from palestra.algorithms.credit import BaselineKey, agent_reward, episode_returns
from palestra.store.calls import time_steps
from palestra.types.records import Trajectory
from unit.building import make_chat, make_episode


def played(*calls: tuple[str, int], rewards: dict[str, float], steps: tuple[float, ...] | None = None, sample: int = 0):
    """An episode whose calls are (agent, time step)."""
    chats = [make_chat(index=n, agent=agent, time_step=step) for n, (agent, step) in enumerate(calls)]
    episode = make_episode(0, sample, rewards=rewards, step_rewards=steps)
    return Trajectory(episode=episode, steps=time_steps(episode, chats))


def credited(trajectory: Trajectory, mode: str, discount: float = 1.0) -> list[float]:
    """For each call what it is credited with."""
    returns = episode_returns(trajectory, mode, discount)
    return [returns.values[returns.key_of[n]] for n in range(len(returns.key_of))]


def test_an_episode_without_reward_has_no_credit():
    open_episode = replace(make_episode(), rewards=None)
    with pytest.raises(ValueError, match="train-000000-00"):
        episode_returns(Trajectory(episode=open_episode, steps=()), "episode", 1.0)


def test_by_episode_all_calls_share_the_sum_of_the_rewards():
    one = played(("a", 0), ("a/b", 0), ("c", 4), rewards={"a": 1.0, "c": 2.0}, steps=(9.0,) * 5)
    returns = episode_returns(one, "episode", 0.5)
    assert credited(one, "episode", 0.5) == [3.0, 3.0, 3.0]
    assert len(returns.values) == 1


def test_by_step_a_call_answers_for_what_came_after_it_discounted():
    one = played(("a", 0), ("a", 1), ("a/b", 1), ("a", 2), rewards={"a": 7.0}, steps=(1.0, 2.0, 4.0))
    assert credited(one, "step", 0.5) == [1 + 1 + 1, 2 + 2, 2 + 2, 4]
    assert credited(one, "step", 0.0) == [1, 2, 2, 4]
    assert credited(one, "step", 1.0) == [7, 6, 6, 4]


def test_rewards_of_steps_without_calls_and_after_the_last_call_count():
    one = played(("a", 1), ("a", 3), rewards={"a": 0.0}, steps=(1.0, 2.0, 4.0, 8.0, 16.0))
    assert credited(one, "step") == [30.0, 24.0]


def test_where_steps_have_no_rewards_the_episodes_is_the_last_steps():
    one = played(("a", 0), ("a", 2), ("b", 2), rewards={"a": 3.0, "b": 1.0})
    assert credited(one, "step", 0.5) == [0.75, 3.0, 1.0]
    assert credited(one, "team-step", 0.5) == [1.0, 4.0, 4.0]


def test_an_episode_without_calls_has_no_units():
    for mode in ("step", "team-step", "agent", "branch"):
        assert episode_returns(played(rewards={"a": 1.0}), mode, 1.0).values == {}


def test_an_agent_has_its_own_reward_its_parents_or_none():
    episode = make_episode(rewards={"a": 1.0, "a/b/c": 5.0, "d": 10.0})
    found = {name: agent_reward(name, episode) for name in ("a", "a/b", "a/b/c", "a/b/c/e", "ab", "")}
    assert found == {"a": 1.0, "a/b": 1.0, "a/b/c": 5.0, "a/b/c/e": 5.0, "ab": 0.0, "": 0.0}


def test_by_agent_each_is_compared_with_the_same_agent_of_the_other_episodes():
    group = [
        played(("a", 0), ("b", 1), rewards={"a": 1.0, "b": 10.0}),
        played(("b", 0), ("a", 1), ("a", 2), rewards={"a": 3.0, "b": 20.0}),
    ]
    credit = group_advantages([episode_returns(t, "agent", 1.0) for t in group], partial(centred_returns, scale="none"))
    assert credit.by_call == [{0: -1.0, 1: -5.0}, {0: 5.0, 1: 1.0, 2: 1.0}]
    assert credit.calls_without_peers == 0


def test_by_branch_subagents_are_compared_with_all_that_the_same_parent_started():
    group = [
        played(("a", 0), ("a/1", 1), ("a/2", 1), rewards={"a": 0.0, "a/1": 1.0, "a/2": 3.0}),
        played(("a", 0), ("a/7", 1), rewards={"a": 2.0, "a/7": 6.0}),
    ]
    by_branch = group_advantages(
        [episode_returns(t, "branch", 1.0) for t in group], partial(centred_returns, scale="none")
    )
    baseline = ((1.0 + 3.0) / 2 + 6.0) / 2  # episodes weigh the same, however many subagents they have
    assert by_branch.by_call == [
        {0: -1.0, 1: 1.0 - baseline, 2: 3.0 - baseline},
        {0: 1.0, 1: 6.0 - baseline},
    ]
    by_agent = group_advantages(
        [episode_returns(t, "agent", 1.0) for t in group], partial(centred_returns, scale="none")
    )
    assert by_agent.by_call == [{0: -1.0, 1: 0.0, 2: 0.0}, {0: 1.0, 1: 0.0}]
    assert (by_branch.calls_without_peers, by_agent.calls_without_peers) == (0, 3)


def test_more_calls_of_an_agent_change_nothing_for_it_or_the_others():
    few = [played(("a", 0), rewards={"a": 1.0}), played(("a", 0), rewards={"a": 4.0})]
    many = [played(*[("a", 0)] * 9, rewards={"a": 1.0}), few[1]]
    for mode in ("episode", "agent", "branch"):
        found = [
            group_advantages([episode_returns(t, mode, 1.0) for t in group], partial(centred_returns, scale="std"))
            for group in (few, many)
        ]
        assert set(found[0].by_call[0].values()) == set(found[1].by_call[0].values())
        assert found[0].by_call[1] == found[1].by_call[1]


def test_by_step_longer_episodes_weigh_no_more_in_the_baseline():
    group = [
        played(("a", 0), ("a", 1), ("a", 2), rewards={"a": 0.0}, steps=(0.0, 0.0, 3.0)),
        played(("a", 0), rewards={"a": 0.0}, steps=(1.0,)),
    ]
    credit = group_advantages([episode_returns(t, "step", 1.0) for t in group], partial(centred_returns, scale="std"))
    mean = (3.0 + 1.0) / 2
    deviation = math.sqrt((1.0 + 1.0) / (2 - 1)) + 1e-4
    assert credit.by_call[0] == pytest.approx({n: (3.0 - mean) / deviation for n in range(3)})
    assert credit.by_call[1] == pytest.approx({0: (1.0 - mean) / deviation})


def test_units_of_a_call_are_named_by_what_they_are_credited_for():
    one = played(("a/b", 3), rewards={"a": 1.0})
    assert episode_returns(one, "step", 1.0).key_of == {0: BaselineKey("a/", ("a/b", 3))}
    assert episode_returns(one, "team-step", 1.0).key_of == {0: BaselineKey("", 3)}
    assert episode_returns(one, "agent", 1.0).key_of == {0: BaselineKey("a/b", "a/b")}
    assert episode_returns(one, "branch", 1.0).key_of == {0: BaselineKey("a/", "a/b")}
