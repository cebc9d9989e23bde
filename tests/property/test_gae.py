"""Generalised advantages of drawn episodes: the sums written out, and what must not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import make_chat, make_episode, make_sample

from palestra.algorithms.gae import chains_of, generalised_advantages, generalized_advantages
from palestra.store.calls import time_steps
from palestra.types.records import TrainSample, Trajectory

numbers = st.floats(-3, 3, allow_nan=False, width=32)
shares = st.sampled_from([0.0, 0.3, 0.9, 1.0])


@st.composite
def episodes(draw):
    """TimeSteps of (agent, tokens), their rewards, whether the episode was cut off, and a value for each token."""
    turns = draw(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), min_size=1, max_size=5))
    rewards = tuple(draw(st.lists(numbers, min_size=len(turns), max_size=len(turns))))
    tokens = sum(n for _, n in turns)
    columns = [draw(st.lists(numbers, min_size=tokens, max_size=tokens)) for _ in range(3)]
    return turns, rewards, draw(st.booleans()), columns


def played(turns, rewards, truncated, cuts) -> tuple[Trajectory, list[TrainSample], list[list[int]]]:
    """An episode whose turns are cut into calls of the sizes that `cuts` gives; a row for each call.

    Returns the number of each row's tokens in the episode as well.
    """
    chats, rows, places, token = [], [], [], 0
    record = make_episode(step_rewards=rewards, facts={"termination": "max_steps"} if truncated else {})
    for step, (agent, size) in enumerate(turns):
        left = size
        while left:
            part = min(left, cuts(step))
            index = len(chats)
            chats.append(make_chat(index=index, agent=agent, time_step=step, completion=range(part)))
            row = make_sample([1, 2, *range(part)], range(2, 2 + part), name=record.episode_id)
            rows.append(replace(row, calls=np.where(row.loss_mask, np.int32(index), np.int32(-1))))
            places.append(list(range(token, token + part)))
            token, left = token + part, left - part
    return Trajectory(episode=record, steps=time_steps(record, chats)), rows, places


def found(episode, cuts, order=None, **settings):
    """Advantages and returns by number of the token in the episode, float64 [2, T]."""
    turns, rewards, truncated, (values, after, penalties) = episode
    trajectory, rows, places = played(turns, rewards, truncated, cuts)
    order = list(range(len(rows))) if order is None else [n % len(rows) for n in order]
    order = list(dict.fromkeys([*order, *range(len(rows))]))

    def column(numbers, n):
        return np.array([np.nan, np.nan, *(numbers[place] for place in places[n])], np.float32)

    given_ = [replace(rows[n], token_rewards=column(penalties, n)) for n in order]
    result = generalized_advantages(
        chains_of(trajectory, dict(enumerate(given_)), "step", settings["discount"]),
        given_,
        [column(values, n) for n in order],
        [column(after, n) for n in order],
        **settings,
    )
    flat = np.full((2, sum(n for _, n in turns)), np.nan)
    for number, n in enumerate(order):
        flat[0, places[n]] = result.advantages[number][2:]
        flat[1, places[n]] = result.returns[number][2:]
    return flat


@examples(100, 1000)
@given(st.lists(st.tuples(numbers, numbers, shares), min_size=1, max_size=12), shares, st.floats(-2, 2))
def test_an_advantage_is_the_sum_of_equation_16(steps, decay, last):
    rewards, values, discounts = (np.array(column, np.float64) for column in zip(*steps, strict=True))
    values_after = np.append(values[1:], last)
    wanted = [
        sum(
            np.prod(discounts[t : t + ahead] * decay)
            * (rewards[t + ahead] + discounts[t + ahead] * values_after[t + ahead] - values[t + ahead])
            for ahead in range(len(steps) - t)
        )
        for t in range(len(steps))
    ]
    np.testing.assert_allclose(generalised_advantages(rewards, values, discounts, decay, last), wanted, atol=1e-9)


@examples(100, 1000)
@given(episodes(), shares)
def test_with_lambda_1_the_return_of_a_token_is_all_that_its_agent_earns_from_there(episode, discount):
    """Whatever the critic says of the states in between; where it was cut off, what it says of the last one counts.

    That value stands for what would have come after the last TimeStep of all, and is discounted like a reward there.
    """
    turns, rewards, truncated, (_, after, penalties) = episode
    result = found(episode, lambda step: 9, discount=discount, decay=1.0, level="token")
    owner = [(agent, step) for step, (agent, size) in enumerate(turns) for _ in range(size)]
    for token, (agent, step) in enumerate(owner):
        own = [n for n in range(token, len(owner)) if owner[n][0] == agent]
        wanted = sum(discount ** (owner[n][1] - step) * penalties[n] for n in own)
        wanted += sum(discount ** (later - step) * rewards[later] for later in range(step, len(turns)))
        if truncated:
            wanted += discount ** (len(turns) - step) * after[own[-1]]
        # A reward belongs to the last token before it: of a turn's tokens all come before the turn's reward.
        np.testing.assert_allclose(result[1, token], wanted, atol=1e-4)


@examples(100, 1000)
@given(
    episodes(),
    shares,
    shares,
    st.sampled_from(["token", "turn"]),
    st.lists(st.integers(1, 3), min_size=5, max_size=5),
    st.lists(st.integers(0, 30)),
)
def test_neither_how_turns_are_cut_into_calls_nor_the_order_of_rows_matters(
    episode, discount, decay, level, sizes, order
):
    settings = {"discount": discount, "decay": decay, "level": level}
    whole = found(episode, lambda step: 9, **settings)
    assert np.isfinite(whole).all()
    assert np.array_equal(found(episode, lambda step: sizes[step], order, **settings), whole)
