"""GAE against Stable-Baselines3 (recorded by oracles/sb3_gae.py), returns written out, and odd episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from palestra.algorithms.credit import step_returns
from palestra.algorithms.gae import chains_of, explained_variance, generalised_advantages, generalized_advantages
from palestra.store.calls import time_steps
from palestra.types.calls import StepTimes
from palestra.types.records import TrainSample, Trajectory
from unit.building import make_chat, make_episode, make_sample

RECORDED = json.loads((Path(__file__).parent / "oracles" / "sb3_gae.json").read_text())


def played(steps: list[tuple[str, int]], **episode) -> tuple[Trajectory, list[TrainSample]]:
    """An episode whose TimeSteps are (agent, tokens of its call), and a row for each call, after three of a prompt."""
    chats = [
        make_chat(index=n, agent=agent, time_step=n, completion=range(10, 10 + tokens))
        for n, (agent, tokens) in enumerate(steps)
    ]
    rows = [
        replace(row, calls=np.where(row.loss_mask, np.int32(n), np.int32(-1)))
        for n, (_, tokens) in enumerate(steps)
        for row in [make_sample([1, 2, 3, *range(10, 10 + tokens)], range(3, 3 + tokens), name="train-000000-00")]
    ]
    record = make_episode(**episode)
    return Trajectory(episode=record, steps=time_steps(record, chats)), rows


def columns(rows, numbers) -> list[np.ndarray]:
    """Numbers of the trained tokens, in order, as columns of the rows."""
    left, found = iter(numbers), []
    for row in rows:
        column = np.full(len(row.ids), np.nan, np.float32)
        column[row.loss_mask] = [next(left) for _ in range(int(row.loss_mask.sum()))]
        found.append(column)
    return found


def trained(rows, found) -> np.ndarray:
    return np.concatenate([column[row.loss_mask] for row, column in zip(rows, found, strict=True)])


def numbered(rows):
    return dict(enumerate(rows))


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"gamma {case['gamma']}, lambda {case['lambda']}")
@pytest.mark.parametrize("level", ["token", "turn"])
def test_advantages_and_returns_are_those_of_stable_baselines3(case, level):
    """There an action is a step; here it is a token, or a turn of one token."""
    advantages, returns = [], []
    for one in case["episodes"]:
        trajectory, rows = played(
            [("agent", 1)] * len(one["rewards"]),
            step_rewards=tuple(one["rewards"]),
            facts={"termination": "max_steps"} if one["truncated"] else {},
        )
        chains = chains_of(trajectory, numbered(rows), "step", case["gamma"])
        after = columns(rows, [*[0.0] * (len(rows) - 1), one["value_after"]])
        values = columns(rows, one["values"])
        found = generalized_advantages(
            chains, rows, values, after, discount=case["gamma"], decay=case["lambda"], level=level
        )
        advantages.append(trained(rows, found.advantages))
        returns.append(trained(rows, found.returns))
    np.testing.assert_allclose(np.concatenate(advantages), case["advantages"], atol=2e-6)
    np.testing.assert_allclose(np.concatenate(returns), case["returns"], atol=2e-6)


def test_a_chain_of_three_states_written_out():
    """r = 0, 0, 1 and V = 0.5, 0.25, 0.75 with gamma 0.9 and lambda 0.5."""
    found = generalised_advantages(
        np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.25, 0.75]), np.full(3, 0.9), 0.5, last_value=0.0
    )
    third = 1 - 0.75
    second = 0.9 * 0.75 - 0.25 + 0.45 * third
    np.testing.assert_allclose(found, [0.9 * 0.25 - 0.5 + 0.45 * second, second, third])


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("level", ["token", "turn"])
def test_without_a_critic_and_with_lambda_1_it_is_the_return_of_the_timestep(discount, level):
    """Of both agents, each of which is credited with all that is earned later, as `credit = step` of GRPO is."""
    rewards = (0.5, -1.0, 2.0, 0.25)
    trajectory, rows = played([("a", 2), ("b", 3), ("a", 1), ("b", 2)], step_rewards=rewards)
    zeros = columns(rows, [0.0] * 8)
    found = generalized_advantages(
        chains_of(trajectory, numbered(rows), "step", discount),
        rows,
        zeros,
        zeros,
        discount=discount,
        decay=1.0,
        level=level,
    )
    wanted = step_returns(trajectory, discount)
    np.testing.assert_allclose(
        trained(rows, found.advantages), np.repeat(wanted, [2, 3, 1, 2]).astype(np.float32), rtol=1e-6
    )


def test_turns_that_are_ordered_by_their_actions():
    trajectory, rows = played([("a", 1), ("b", 1)], step_rewards=(1.0, 2.0), step_times=None)
    later = replace(
        trajectory, episode=replace(trajectory.episode, step_times=(StepTimes(0.0, 9.0), StepTimes(1.0, 5.0)))
    )
    zeros = columns(rows, [0.0, 0.0])
    for one, order, wanted in ((later, "observed", [3.0, 2.0]), (later, "acted", [1.0, 3.0])):
        chains = chains_of(one, numbered(rows), "step", 1.0, order)
        found = generalized_advantages(chains, rows, zeros, zeros, discount=1.0, decay=1.0, level="token")
        assert trained(rows, found.advantages).tolist() == wanted


def test_a_truncated_episode_ends_with_the_value_of_what_would_have_followed_and_a_terminated_one_with_none():
    values, after = [0.5, 0.25, 2.0], [7.0, 7.0, 4.0]
    for facts, last in (({"termination": "max_steps"}, 4.0), ({"termination": "done"}, 0.0), ({}, 0.0)):
        trajectory, rows = played([("agent", 3)], reward=1.0, facts=facts)
        found = generalized_advantages(
            chains_of(trajectory, numbered(rows), "step", 0.5),
            rows,
            columns(rows, values),
            columns(rows, after),
            discount=0.5,
            decay=0.0,
            level="token",
        )
        assert trained(rows, found.advantages).tolist() == [-0.25, 1.75, 1.0 + 0.5 * last - 2.0]
        assert trained(rows, found.returns).tolist() == [0.25, 2.0, 1.0 + 0.5 * last]
        assert (trajectory.steps[-1].terminated, trajectory.steps[-1].truncated) == (last == 0.0, last != 0.0)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_the_value_after_a_cut_is_discounted_by_all_timesteps_until_it(level):
    """The agent acts first, and two TimeSteps of another follow: 8 there and then is worth as much as 8 of reward."""
    steps, cut = [("a", 1), ("b", 1), ("b", 1)], {"termination": "max_steps"}
    cases = (((0.0, 0.0, 0.0), cut, 0.5**3 * 8.0), ((0.0, 0.0, 8.0), {}, 0.5**2 * 8.0))
    for step_rewards, facts, wanted in cases:
        trajectory, rows = played(steps, step_rewards=step_rewards, facts=facts)
        found = generalized_advantages(
            chains_of(trajectory, numbered(rows), "step", 0.5),
            rows,
            columns(rows, [0.0] * 3),
            columns(rows, [8.0] * 3),
            discount=0.5,
            decay=1.0,
            level=level,
        )
        assert trained(rows, found.advantages)[0] == wanted


def test_all_tokens_of_a_turn_have_the_advantage_of_its_first_state():
    trajectory, rows = played([("agent", 2), ("agent", 3)], step_rewards=(1.0, 3.0))
    found = generalized_advantages(
        chains_of(trajectory, numbered(rows), "step", 1.0),
        rows,
        columns(rows, [0.5, 9.0, 2.0, 9.0, 9.0]),
        columns(rows, [0.0] * 5),
        discount=1.0,
        decay=0.5,
        level="turn",
    )
    second = 3.0 - 2.0
    first = 1.0 + 2.0 - 0.5 + 0.5 * second
    assert trained(rows, found.advantages).tolist() == [first, first, second, second, second]
    assert trained(rows, found.returns).tolist() == [first + 0.5] * 2 + [3.0] * 3


def test_an_agent_earns_its_own_reward_or_that_of_its_parent_unless_they_are_pooled():
    trajectory, rows = played([("a", 1), ("b", 1), ("a/search", 1)], rewards={"a": 1.0, "b": -1.0, "c": 3.0})
    zeros = columns(rows, [0.0] * 3)
    own, pooled = [1.0, -1.0, 1.0], [3.0] * 3
    for credit, wanted in (("agent", own), ("step", own), ("episode", pooled), ("team-step", pooled)):
        chains = chains_of(trajectory, numbered(rows), credit, 1.0)
        found = generalized_advantages(chains, rows, zeros, zeros, discount=1.0, decay=1.0, level="token")
        assert trained(rows, found.advantages).tolist() == wanted, credit


@pytest.mark.parametrize("level", ["token", "turn"])
def test_it_does_not_matter_into_how_many_rows_and_calls_a_turn_is_cut(level):
    draw = np.random.default_rng(3)
    values, after = draw.normal(size=6).tolist(), draw.normal(size=6).tolist()
    record = make_episode(facts={"termination": "max_steps"})
    whole_chat = make_chat(index=0, agent="agent", time_step=0, completion=range(6))
    whole = Trajectory(episode=record, steps=time_steps(record, [whole_chat]))
    row = make_sample([1, 2, *range(10, 16)], range(2, 8), name=record.episode_id)
    cut_chats = [make_chat(index=n, agent="agent", time_step=0, completion=range(2)) for n in range(3)]
    cut = Trajectory(episode=record, steps=time_steps(record, cut_chats))
    rows = [
        replace(
            make_sample(row.ids[: 4 + 2 * n].tolist(), [2 + 2 * n, 3 + 2 * n], name=record.episode_id),
            calls=np.where(np.arange(4 + 2 * n) >= 2 + 2 * n, np.int32(n), np.int32(-1)),
        )
        for n in (2, 0, 1)
    ]
    order = [2, 0, 1]

    def found(trajectory, rows, values, after):
        return generalized_advantages(
            chains_of(trajectory, numbered(rows), "step", 0.9),
            rows,
            columns(rows, values),
            columns(rows, after),
            discount=0.9,
            decay=0.8,
            level=level,
        )

    one = trained([row], found(whole, [row], values, after).advantages).reshape(3, 2)[order].flatten()
    shuffled = [np.array(numbers).reshape(3, 2)[order].flatten().tolist() for numbers in (values, after)]
    assert trained(rows, found(cut, rows, *shuffled).advantages).tolist() == one.tolist()


def test_tokens_that_are_not_trained_are_no_actions():
    trajectory, rows = played([("agent", 1), ("agent", 2), ("agent", 1)], step_rewards=(1.0, 2.0, 4.0))
    without = [rows[0], rows[2]]
    chains = chains_of(trajectory, numbered(without), "step", 1.0)
    assert [chain.rewards.tolist() for chain in chains] == [[3.0, 4.0]]  # what the call left out earned came before
    assert chains_of(trajectory, {}, "step", 1.0) == []


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant_one():
    returns = np.array([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 7.0), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert np.isnan(explained_variance(returns, np.ones(3)))
    assert np.isnan(explained_variance(np.zeros(0), np.zeros(0)))
