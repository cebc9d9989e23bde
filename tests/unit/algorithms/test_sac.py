"""SAC for finite actions: its gradient against autograd, its values against soft value iteration, and its targets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.algorithms.base import Group
from palestra.algorithms.sac import SAC
from palestra.config import SACConfig
from palestra.store.calls import time_steps
from palestra.tokens import choice_rows
from palestra.types.calls import GrammarSpan
from palestra.types.records import TrainSample, Trajectory
from unit.building import make_chat, make_episode, make_sample

ALPHA = 0.3
SINGLE = ((10,), (11,), (12,))
SEVERAL = ((10,), (11, 20), (11, 21, 30))  # choices of one, two and three tokens, two of which begin alike


def sac(**settings) -> SAC:
    return SAC(SACConfig.model_validate({"temperature": ALPHA, "target_entropy": 0.0} | settings))


def episode(choices, taken, rewards=None, agents=None, times=None, number=0, **record):
    """An episode of decisions, and a row for each choice of each; `taken` has the place of the one that was taken."""
    name = f"train-{number:06d}-00"
    chats = [
        make_chat(
            index=n,
            agent="agent" if agents is None else agents[n],
            time_step=n if times is None else times[n],
            completion=choices[place],
        )
        for n, place in enumerate(taken)
    ]
    rows = [
        row_of(choice, n, name, given=place == taken[n])
        for n in range(len(taken))
        for place, choice in enumerate(choices)
    ]
    made = make_episode(episode_id=name, group_index=number, step_rewards=rewards, **record)
    return Trajectory(episode=made, steps=time_steps(made, chats)), rows


def row_of(choice, call, name, given) -> TrainSample:
    length = 3 + len(choice)
    row = make_sample([1, 2, 3, *choice], range(3, length), name=name)
    return replace(
        row,
        calls=np.where(row.loss_mask, np.int32(call), np.int32(-1)),
        logprobs=row.logprobs if given else np.full(length, np.nan, np.float32),
        grammars=(GrammarSpan(3, len(choice), "g"),),
    )


def columns(rows, of_row) -> list[np.ndarray]:
    """For each row a column whose trained tokens have these numbers."""
    found = []
    for row, numbers in zip(rows, of_row, strict=True):
        column = np.full(len(row.ids), np.nan, np.float32)
        column[row.loss_mask] = numbers
        found.append(column)
    return found


def token_logprobs(choices, scores) -> list[torch.Tensor]:
    """The logprob of each token of each choice: a softmax over what may follow, at each node of the choices' tree."""
    nodes: dict[tuple[int, ...], list[int]] = {}
    for choice in choices:
        for place, token in enumerate(choice):
            following = nodes.setdefault(choice[:place], [])
            if token not in following:
                following.append(token)
    of_node, start = {}, 0
    for prefix, following in nodes.items():
        of_node[prefix] = dict(
            zip(following, torch.log_softmax(scores[start : start + len(following)], 0), strict=True)
        )
        start += len(following)
    return [torch.stack([of_node[choice[:n]][token] for n, token in enumerate(choice)]) for choice in choices]


@pytest.mark.parametrize("choices", [SINGLE, SEVERAL])
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_the_gradient_is_that_of_the_soft_value_written_out(choices, seed):
    """autograd through V = sum of pi(a) (Q(a) - alpha log pi(a)), with the probabilities of whole choices."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(8, generator=draw, dtype=torch.float64, requires_grad=True)
    q = torch.randn(len(choices), generator=draw, dtype=torch.float64)
    log_pi = torch.stack([own.sum() for own in token_logprobs(choices, scores)])
    assert float(log_pi.detach().exp().sum()) == pytest.approx(1.0)
    (log_pi.exp() * (q - ALPHA * log_pi)).sum().backward()
    wanted, scores.grad = scores.grad, None

    trajectory, rows = episode(choices, [1], rewards=(0.0,))
    logprobs = token_logprobs(choices, scores)
    forward = {
        "old_logprobs": columns(rows, [own.detach().numpy() for own in logprobs]),
        "action_values": columns(rows, [[9.0] * (len(c) - 1) + [float(v)] for c, v in zip(choices, q, strict=True)]),
        "target_action_values": columns(rows, [[0.0] * len(c) for c in choices]),
    }
    found = sac().advantages([Group(trajectories=(trajectory,), rows=tuple(rows))], forward)
    loss = torch.zeros((), dtype=torch.float64)
    for row, advantages, own in zip(rows, found.advantages, logprobs, strict=True):
        ratio = (own - own.detach()).exp()
        loss = loss - (ratio * torch.from_numpy(advantages[row.loss_mask]).double()).sum()
    loss.backward()
    torch.testing.assert_close(-scores.grad, wanted, atol=1e-6, rtol=1e-5)
    assert found.metrics["state_value_mean"] == pytest.approx(
        float((log_pi.exp() * (q - ALPHA * log_pi)).sum().detach()), rel=1e-5
    )


def flat_forward(rows, log_pi, values, targets):
    """Choices of one token each: their numbers, row by row."""
    return {
        "old_logprobs": columns(rows, [[x] for x in log_pi]),
        "action_values": columns(rows, [[x] for x in values]),
        "target_action_values": columns(rows, [[x] for x in targets]),
    }


def learned(algorithm, trajectory, rows, forward) -> dict[int, float]:
    """What the critic is to say, by the number of the row; the other rows teach it nothing."""
    found = algorithm.advantages([Group(trajectories=(trajectory,), rows=tuple(rows))], forward).returns
    assert all(np.isnan(column[~row.loss_mask]).all() for row, column in zip(rows, found, strict=True))
    return {n: float(column[row.loss_mask][-1]) for n, (row, column) in enumerate(zip(rows, found, strict=True))
            if not np.isnan(column[row.loss_mask]).all()}  # fmt: skip


def soft(log_pi, targets) -> float:
    return sum(math.exp(p) * (q - ALPHA * p) for p, q in zip(log_pi, targets, strict=True))


LOG_PI = [math.log(p) for p in (0.5, 0.3, 0.2, 0.1, 0.1, 0.8, 0.25, 0.25, 0.5)]
TARGETS = [0.1, 0.7, 0.3, 1.0, -1.0, 0.5, 0.2, 0.4, 0.6]


@pytest.mark.parametrize(("ended", "last"), [("done", 2.0), ("max_steps", None)])
def test_a_decision_bootstraps_from_the_next_one_and_the_last_one_from_nothing(ended, last):
    """An episode that was cut off says nothing of what its last decision was worth, so that one is not learned."""
    trajectory, rows = episode(SINGLE, [2, 0, 1], rewards=(0.5, 0.0, 2.0), facts={"termination": ended})
    found = learned(sac(discount=0.9), trajectory, rows, flat_forward(rows, LOG_PI, [0.0] * 9, TARGETS))
    wanted = {
        2: 0.5 + 0.9 * soft(LOG_PI[3:6], TARGETS[3:6]),
        3: 0.0 + 0.9 * soft(LOG_PI[6:], TARGETS[6:]),
    } | ({} if last is None else {7: last})
    assert found == pytest.approx(wanted, rel=1e-5)


def test_agents_have_chains_of_their_own_and_time_that_passes_is_discounted():
    """White acts in TimeSteps 0 and 2, black in 1; a reward of step 1 is white's as well, discounted once."""
    trajectory, rows = episode(SINGLE, [0, 0, 0], rewards=(0.0, 1.0, 4.0), agents=["white", "black", "white"])
    found = learned(sac(discount=0.5), trajectory, rows, flat_forward(rows, LOG_PI, [0.0] * 9, TARGETS))
    wanted = {0: 0.0 + 0.5 * 1.0 + 0.25 * soft(LOG_PI[6:], TARGETS[6:]), 3: 1.0 + 0.5 * 4.0, 6: 4.0}
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("share", "sign"), [(0.1, -1), (1.0, 1)])
def test_the_temperature_falls_where_the_entropy_is_above_its_target_and_rises_below(share, sign, monkeypatch):
    monkeypatch.setattr("palestra.algorithms.sac.TEMPERATURE_RATE", 0.5)
    algorithm = sac(target_entropy=share)
    trajectory, rows = episode(SINGLE, [0], rewards=(0.0,))
    found = algorithm.advantages(
        [Group(trajectories=(trajectory,), rows=tuple(rows))], flat_forward(rows, LOG_PI[:3], [0.0] * 3, [0.0] * 3)
    )
    entropy = -sum(math.exp(p) * p for p in LOG_PI[:3])
    assert found.metrics["temperature"] == pytest.approx(ALPHA)
    assert found.metrics["choice_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found.metrics["choice_entropy_target"] == pytest.approx(share * math.log(3))
    moved = algorithm.state()["log_temperature"] - math.log(ALPHA)
    assert moved == pytest.approx(-0.5 * (entropy - share * math.log(3)), rel=1e-5)
    assert math.copysign(1, moved) == sign
    other = sac()
    other.restore(algorithm.state())
    assert other.state() == algorithm.state()


@pytest.mark.slow
def test_values_of_a_known_chain_are_found():
    """Three places in a row; left ends the walk with 0.3 from each, right leads on, and ends with 1 from the last.

    Soft value iteration gives Q and the policy; SAC, with a table for the critic and scores for the policy, must reach
    them by its targets and advantages alone.
    """
    gamma, left, end, places = 0.8, 0.3, 1.0, 3
    q, v = np.zeros((places, 2)), np.zeros(places + 1)
    for _ in range(100):
        for s in range(places):
            q[s] = [left, end if s == places - 1 else gamma * v[s + 1]]
            v[s] = ALPHA * np.log(np.exp(q[s] / ALPHA).sum())
    pi = np.exp(q / ALPHA) / np.exp(q / ALPHA).sum(axis=1, keepdims=True)

    algorithm, table, scores = sac(discount=gamma), np.zeros((places, 2)), np.zeros((places, 2))
    walks = []  # each place left by each way
    for length in range(places):
        walks.append(([1] * length + [0], [0.0] * length + [left]))
    walks.append(([1] * places, [0.0] * (places - 1) + [end]))
    for _ in range(400):
        groups, seen = [], []
        for number, (taken, rewards) in enumerate(walks):
            trajectory, rows = episode(((10,), (11,)), taken, rewards=tuple(rewards), number=number)
            groups.append(Group(trajectories=(trajectory,), rows=tuple(rows)))
            seen += [(s, a) for s in range(len(taken)) for a in range(2)]
        rows = [row for group in groups for row in group.rows]
        log_pi = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        forward = flat_forward(rows, [log_pi[p] for p in seen], [table[p] for p in seen], [table[p] for p in seen])
        found = algorithm.advantages(groups, forward)
        new = table.copy()
        for place, row, returns, advantages in zip(seen, rows, found.returns, found.advantages, strict=True):
            if not np.isnan(returns[row.loss_mask]).all():
                new[place] = returns[row.loss_mask][-1]
            # The gradient by scores of sg(share) log pi(a), summed over both choices, is share(a) for score a.
            scores[place] += 2.0 * float(advantages[row.loss_mask][0])
        table = new
    np.testing.assert_allclose(table, q, atol=1e-3)
    np.testing.assert_allclose(np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True), pi, atol=1e-3)


def test_a_row_for_each_choice_has_what_was_sampled_only_where_it_was():
    chat = make_chat(index=4, completion=[11, 20])
    rows = choice_rows(chat, SEVERAL)
    prompt = chat.prompt_ids.tolist()
    assert [row.ids.tolist() for row in rows] == [[*prompt, 10], [*prompt, 11, 20], [*prompt, 11, 21]]  # 30 is certain
    assert [int(row.loss_mask.sum()) for row in rows] == [1, 2, 2]
    assert [row.grammars[0].tokens for row in rows] == [1, 2, 2]
    assert [bool(np.isfinite(row.logprobs[row.loss_mask]).all()) for row in rows] == [False, True, False]
    np.testing.assert_array_equal(rows[1].logprobs[rows[1].loss_mask], chat.logprobs)
    assert all(set(row.calls[row.loss_mask].tolist()) == {4} for row in rows)
    with pytest.raises(ValueError, match=r"call.*4.*2"):
        choice_rows(chat, (SEVERAL[0], SEVERAL[2]))


@pytest.mark.parametrize(
    "wrong",
    [{"kl": {"coefficient": 0.1}}, {"entropy_coefficient": 0.1}, {"epochs": 2}, {"minibatches": 2}, {"clip_low": 0.1}],
)
def test_settings_that_mean_nothing_here_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SACConfig.model_validate(wrong)
