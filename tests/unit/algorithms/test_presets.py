"""Each algorithm on a batch that is small enough for its formula to be written out here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest

from palestra.algorithms.base import Group
from palestra.algorithms.policy_gradient import PolicyGradient
from palestra.algorithms.registry import ALGORITHMS, create_algorithm
from palestra.config import parse_config
from unit.building import make_chat, make_sample, make_trajectory

REWARDS = [[1.0, 0.0, 0.0, 2.0], [0.5, 0.5, 0.5, 0.5], [3.0, -1.0]]
ALL = [reward for group in REWARDS for reward in group]


def made(name: str, **settings):
    return create_algorithm(parse_config({"algorithm": {"name": name, **settings}}).algorithm)


def groups_of(rewards=REWARDS, **chat) -> list[Group]:
    """Groups of episodes with one call of two tokens and one row each."""
    found = []
    for number, of_group in enumerate(rewards):
        episodes, rows = [], []
        for place, reward in enumerate(of_group):
            name = f"train-{number:06d}-{place:02d}"
            episodes.append(make_trajectory(number, place, reward, [make_chat(name, **chat)]))
            rows.append(make_sample([1, 2, 3, 4, 5], [3, 4], name=name))
        found.append(Group(trajectories=tuple(episodes), rows=tuple(rows)))
    return found


def found_of(algorithm, groups):
    """What the algorithm makes of the groups, with a critic that says 0.25 everywhere if it has one."""
    rows = [row for group in groups for row in group.rows]
    value = [np.where(row.loss_mask, np.float32(0.25), np.float32(np.nan)) for row in rows]
    return algorithm.advantages(groups, dict.fromkeys(algorithm.needs, value))


def advantages(algorithm, groups) -> list[list[float]]:
    """The advantage of each episode, by group; both of its tokens have it, unless a critic tells them apart."""
    columns = iter(found_of(algorithm, groups).advantages)
    found = []
    for group in groups:
        values = [column[row.loss_mask] for row, column in zip(group.rows, columns, strict=False)]
        assert algorithm.critic is not None or all(value[0] == value[1] for value in values)
        found.append([float(value[0]) for value in values])
    return found


def centred(values):
    return [value - mean(values) for value in values]


def normalised(values):
    return [value / (stdev(values) + 1e-4) if stdev(values) else 0.0 for value in centred(values)]


def left_out(values):
    return [value - (sum(values) - value) / (len(values) - 1) for value in values]


def close(found, wanted):
    assert [value for group in found for value in group] == pytest.approx(
        [value for group in wanted for value in group], abs=1e-6
    )


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_the_groups_mean_and_deviation(name):
    close(advantages(made(name), groups_of()), map(normalised, REWARDS))
    close(advantages(made(name, advantage_scale="none"), groups_of()), map(centred, REWARDS))


def test_dr_grpo_divides_by_nothing():
    close(advantages(made("dr_grpo"), groups_of()), map(centred, REWARDS))


def test_rloo_leaves_the_episode_itself_out():
    close(advantages(made("rloo"), groups_of()), map(left_out, REWARDS))


def test_reinforce_pp_normalises_over_the_batch():
    wanted = iter(normalised(ALL))
    close(advantages(made("reinforce_pp"), groups_of()), [[next(wanted) for _ in group] for group in REWARDS])
    assert made("reinforce_pp").learns_from(groups_of()[1].trajectories)


def test_reinforce_pp_with_baseline_normalises_what_is_centred():
    algorithm = made("reinforce_pp", baseline="group")
    wanted = iter(normalised([value for group in REWARDS for value in centred(group)]))
    close(advantages(algorithm, groups_of()), [[next(wanted) for _ in group] for group in REWARDS])
    assert [algorithm.learns_from(group.trajectories) for group in groups_of()] == [True, False, True]


def test_reinforce_pp_counts_calls_without_peers_where_it_compares_them():
    """`helper` is in one episode of each group, and in two of the batch."""
    groups = []
    for number in range(2):
        episodes, rows = [], []
        for place, agents in enumerate((("agent", "helper"), ("agent",))):
            name = f"train-{number:06d}-{place:02d}"
            chats = [make_chat(name, index=n, agent=agent) for n, agent in enumerate(agents)]
            episodes.append(make_trajectory(number, place, float(place + number), chats))
            rows.append(make_sample([1, 2, 3, 4, 5], [3, 4], name=name))
        groups.append(Group(trajectories=tuple(episodes), rows=tuple(rows)))
    for baseline, wanted in (("group", 2.0), ("none", 0.0)):
        algorithm = made("reinforce_pp", baseline=baseline, credit="agent")
        assert algorithm.advantages(groups, {}).metrics["calls_without_peers"] == wanted


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_a_group_of_equal_returns_teaches_nothing(name):
    assert [made(name).learns_from(group.trajectories) for group in groups_of()] == [True, False, True]


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("episodes", [3, 6])
def test_rloo_learns_nothing_from_equal_rewards_whose_sum_is_rounded(reward, episodes):
    """0.1 + 0.1 + 0.1 is not 0.3, so that the mean of the others would differ from each by 1e-17."""
    (group,) = groups_of([[reward] * episodes])
    assert made("rloo").learns_from(group.trajectories) is False
    assert advantages(made("rloo"), [group]) == [[0.0] * episodes]


def test_rae_compares_with_a_moving_mean_that_a_checkpoint_keeps():
    algorithm, baseline, wanted = made("rae"), 0.0, []
    for group in REWARDS:
        wanted.append([])
        for reward in group:
            baseline = 0.95 * baseline + 0.05 * reward
            wanted[-1].append(reward - baseline)
    close(advantages(algorithm, groups_of()), wanted)
    assert algorithm.state() == {"baselines": {"agent": pytest.approx(baseline)}}
    restored = made("rae")
    restored.restore(json.loads(json.dumps(algorithm.state())))
    assert advantages(restored, groups_of()) == advantages(algorithm, groups_of())
    assert advantages(algorithm, groups_of()) != advantages(made("rae"), groups_of())


def test_rae_has_a_baseline_for_each_role():
    chats = [replace(make_chat(index=n), agent=agent) for n, agent in enumerate(("black", "white"))]
    trajectory = make_trajectory(0, 0, 0.0, chats)
    episode = replace(trajectory.episode, rewards={"black": 1.0, "white": -1.0})
    algorithm = made("rae")
    (found,) = algorithm.estimate([algorithm.returns([replace(trajectory, episode=episode)])])
    assert found.by_call == [{0: pytest.approx(0.95), 1: pytest.approx(-0.95)}]
    assert algorithm.state() == {"baselines": {"black": pytest.approx(0.05), "white": pytest.approx(-0.05)}}


def replies_of(lengths: list[int], rewards: list[float]):
    """Episodes of one reply of at most 10 tokens."""
    return tuple(
        make_trajectory(0, place, reward, [make_chat(f"train-000000-{place:02d}", completion=[7] * n, max_tokens=10)])
        for place, (n, reward) in enumerate(zip(lengths, rewards, strict=True))
    )


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_dapo_learns_nothing_of_equal_outcomes_whatever_their_lengths(reward, scale):
    """Also where their rows are trained, by an entropy bonus or a penalty of divergence, no length has an advantage."""
    episodes = replies_of([8, 9, 10, 4], [reward] * 4)
    algorithm = made("dapo", advantage_scale=scale)
    assert not algorithm.learns_from(episodes)
    rows = tuple(make_sample([1, 2, 3, 4, 5], [3, 4], name=one.episode.episode_id) for one in episodes)
    group = Group(trajectories=episodes, rows=rows)
    assert advantages(algorithm, [group]) == [[0.0] * 4]
    longer = replies_of([8, 9, 10, 4], [reward] * 3 + [0.5])
    assert algorithm.learns_from(longer)
    (found,) = advantages(algorithm, [replace(group, trajectories=longer)])
    assert found[0] > found[1] > found[2]


def test_dapo_lowers_the_return_of_a_long_reply_in_a_line():
    lengths = [8, 9, 10, 4]  # of at most 10 tokens, of which the last fifth costs
    episodes = replies_of(lengths, [1.0, 1.0, 1.0, 0.0])
    dapo = made("dapo")
    values = [list(each.values.values()) for each in dapo.shaped(episodes, dapo.returns(episodes))]
    assert values == [[1.0], [pytest.approx(0.5)], [0.0], [0.0]]
    assert made("dapo").batch_metrics([Group(trajectories=episodes)]) == {"overlong_replies": 0.5}


def test_gspo_credits_the_calls_of_a_sequence_apart_where_the_credit_does():
    chats = [make_chat("train-000000-00", index=0), make_chat("train-000000-00", index=1, completion=[4, 5, 6, 7])]
    steps = make_trajectory(0, 0, 1.0, chats)
    steps = replace(steps, episode=replace(steps.episode, step_rewards=(0.0, 3.0)))
    other = make_trajectory(0, 1, 0.0, [make_chat("train-000000-01")])
    rows = [make_sample([1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7], name="train-000000-00")]
    rows[0] = replace(rows[0], calls=np.array([-1, -1, 0, 0, 1, 1, 1, 1], np.int32))
    groups = [Group(trajectories=(steps, other), rows=tuple(rows))]
    settings = {"credit": "step", "discount": 0.5, "advantage_scale": "none"}
    (by_call,) = made("gspo", **settings).advantages(groups, {}).advantages
    first, second = set(by_call[2:4].tolist()), set(by_call[4:].tolist())
    assert (len(first), len(second)) == (1, 1)
    assert first != second


@pytest.mark.parametrize("name", [name for name, made in ALGORITHMS.items() if issubclass(made, PolicyGradient)])
def test_every_algorithm_is_described_and_its_loss_has_the_configured_numbers(name):
    if name == "a2c":  # nothing bounds its ratios
        algorithm = made(name)
        assert algorithm.loss().parameters == {}
    else:
        algorithm = made(name, clip_low=0.5, clip_high=0.75)
        assert algorithm.loss().parameters == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.75}
    about = algorithm.about
    assert all((about.summary, about.formula, about.paper))
    assert {metric.name for metric in algorithm.metrics} >= found_of(algorithm, groups_of()).metrics.keys()


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not made(name).needs])
def test_equal_rewards_and_a_batch_of_one_give_finite_advantages(name):
    for rewards in ([[1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], [[1e6, -1e6]]):
        assert all(math.isfinite(v) for group in advantages(made(name), groups_of(rewards)) for v in group)


@pytest.mark.parametrize("settings", [{"name": "reinforce_pp"}, {"name": "grpo", "advantage_scale": "gdpo"}])
def test_returns_are_compared_within_an_environment_alone(settings):
    """Rewards of one are a thousand times as large; each environment has the advantages that it has alone."""
    mixed = [
        replace(group, environment=name)
        for group, name in zip(
            groups_of([(1.0, 0.0), (1000.0, 0.0), (0.0, 1.0), (0.0, 0.0, 1000.0)]), "abab", strict=True
        )
    ]
    found = advantages(made(**settings), mixed)
    for name, places in (("a", (0, 2)), ("b", (1, 3))):
        alone = advantages(made(**settings), [group for group in mixed if group.environment == name])
        assert [found[place] for place in places] == alone
    assert found != advantages(made(**settings), [replace(group, environment="") for group in mixed])
