"""Named rewards against TRL's two ways of adding them up (`multi_objective_aggregation`), written out with numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from palestra.algorithms.base import Group
from palestra.algorithms.named_rewards import reward_means, with_missing_rewards
from palestra.algorithms.registry import create_algorithm
from palestra.config import GRPOConfig, parse_config
from palestra.errors import ConfigError
from unit.building import make_chat, make_sample, make_trajectory

WEIGHTS = {"right": 1.0, "short": 0.25}
NAMED = [
    [{"right": 1.0, "short": 30.0}, {"right": 0.0, "short": 10.0}, {"right": 0.0, "short": 20.0}],
    [{"right": 0.0, "short": 5.0}, {"right": 1.0, "short": 5.0}, {"right": 1.0, "short": 8.0}],
]


def made(name: str = "grpo", **settings):
    return create_algorithm(
        parse_config({"algorithm": {"name": name, "reward_weights": WEIGHTS, **settings}}).algorithm
    )


def episode_of(number: int, place: int, rewards, chats):
    """An episode with one reward, or with rewards by name."""
    if not isinstance(rewards, dict):
        return make_trajectory(number, place, rewards, chats)
    scored = sum(WEIGHTS.get(key, 1.0) * value for key, value in rewards.items() if value is not None)
    episode = make_trajectory(number, place, scored, chats)
    return replace(episode, episode=replace(episode.episode, named_rewards=rewards))


def groups_of(named) -> list[Group]:
    found = []
    for number, of_group in enumerate(named):
        episodes, rows = [], []
        for place, rewards in enumerate(of_group):
            name = f"train-{number:06d}-{place:02d}"
            episodes.append(episode_of(number, place, rewards, [make_chat(name)]))
            rows.append(make_sample([1, 2, 3, 4, 5], [3, 4], name=name))
        found.append(Group(trajectories=tuple(episodes), rows=tuple(rows)))
    return found


def advantages(algorithm, named) -> np.ndarray:
    found = algorithm.advantages(groups_of(named), {}).advantages
    return np.array([column[3] for column in found]).reshape(len(named), -1)


def columns(named) -> np.ndarray:
    """[groups, episodes, names], NaN where not scored."""
    return np.array([[[np.nan if r[k] is None else r[k] for k in WEIGHTS] for r in group] for group in named])


def test_the_weighted_sum_is_the_reward():
    rewards = columns(NAMED) @ np.array(list(WEIGHTS.values()))
    centred = rewards - rewards.mean(1, keepdims=True)
    wanted = centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(advantages(made(), NAMED), wanted, atol=1e-6)
    np.testing.assert_allclose(advantages(made("dr_grpo"), NAMED), centred, atol=1e-6)


def test_gdpo_normalises_each_reward_in_its_group_and_the_sum_in_the_batch():
    """TRL's `normalize_then_sum`, line by line; in the sum each reward counts by its weight, whatever its range."""
    grouped = columns(NAMED)
    each = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)
    summed = each @ np.array(list(WEIGHTS.values()))
    wanted = (summed - summed.mean()) / (summed.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(advantages(made(advantage_scale="gdpo"), NAMED), wanted, atol=1e-6)
    larger = [[{**r, "short": 1000 * r["short"]} for r in group] for group in NAMED]
    np.testing.assert_allclose(advantages(made(advantage_scale="gdpo"), larger), wanted, atol=1e-3)


@pytest.mark.parametrize("scale", ["std", "none", "gdpo"])
def test_a_reward_that_was_not_scored_is_neither_good_nor_bad(scale):
    """Its episode stands where it would if it had the mean of those that were scored; as a 0 it would be the worst."""
    unscored = [[{"right": 1.0, "short": None}, {"right": 1.0, "short": 10.0}, {"right": 1.0, "short": 20.0}]]
    first, low, high = advantages(made(advantage_scale=scale), unscored)[0]
    assert (first, low < 0 < high) == (pytest.approx(0.0, abs=1e-6), True)


def test_where_no_episode_of_a_group_was_scored_the_name_counts_nothing():
    unscored = [[{"right": 1.0, "short": None}, {"right": 0.0, "short": None}]]
    found = advantages(made(advantage_scale="none"), unscored)
    np.testing.assert_allclose(found, [[0.5, -0.5]])
    assert made().learns_from(groups_of([[{"right": 1.0, "short": None}] * 2])[0].trajectories) is False


def test_gdpo_learns_where_the_sum_of_a_group_is_equal_and_its_parts_are_not():
    """Two rewards that cancel out in the sum, of which one has a smaller range."""
    named = [[{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 4.0}, {"right": 0.5, "short": 2.0}]]
    groups = groups_of(named)
    assert made().learns_from(groups[0].trajectories) is False
    assert made(advantage_scale="gdpo").learns_from(groups[0].trajectories) is True


def test_the_mean_of_each_name_is_over_the_episodes_in_which_it_was_scored():
    named = [[{"right": 1.0, "short": None}, {"right": 0.0, "short": 4.0}], [{"other": -1.0}, {"right": 0.5}]]
    episodes = [trajectory for group in named for trajectory in _episodes(group)]
    assert reward_means([t.episode.named_rewards for t in episodes]) == {"other": -1.0, "right": 0.5, "short": 4.0}
    assert reward_means([None]) == reward_means([]) == {}


def _episodes(named):
    plain = [make_trajectory(0, place, 0.0, [make_chat()]) for place in range(len(named))]
    return [replace(t, episode=replace(t.episode, named_rewards=n)) for t, n in zip(plain, named, strict=True)]


def by_steps(place: int, right: float, style: float | None, weight: float = 0.5):
    """Two calls, each a TimeStep, of which only the last one earns something."""
    name = f"train-000000-{place:02d}"
    chats = [make_chat(name), make_chat(name, index=1, time_step=1)]
    total = right + (0.0 if style is None else weight * style)
    found = make_trajectory(0, place, total, chats)
    named = {"right": right, "style": style}
    return replace(found, episode=replace(found.episode, named_rewards=named, step_rewards=(0.0, total)))


@pytest.mark.parametrize("credit", ["episode", "step", "agent", "branch"])
def test_what_was_not_scored_is_no_zero_whatever_is_credited(credit):
    """The first episode is like the second but for what was not scored; it stands between the other two."""
    settings = {"advantage_scale": "none", "credit": credit, "reward_weights": {"style": 0.5}}
    episodes = [by_steps(0, 1.0, None), by_steps(1, 1.0, 4.0), by_steps(2, 1.0, 8.0)]
    returns = made(**settings).returns(episodes)
    for number in (0, 1):
        first, low, high = (of.values[of.key_of[number]] for of in returns)
        assert (first, low, high) == (4.0, 3.0, 5.0)


def test_a_critic_learns_no_zero_for_what_was_not_scored():
    algorithm = made("ppo", reward_weights={"style": 0.5}, advantage_scale="none", gae_lambda=1.0)
    episodes = [by_steps(0, 1.0, None), by_steps(1, 1.0, 4.0), by_steps(2, 1.0, 8.0)]
    rows = tuple(make_sample([1, 2, 3, 4, 5], [3, 4], name=f"train-000000-{place:02d}") for place in range(3))
    nothing = [np.where(row.loss_mask, 0.0, np.nan).astype(np.float32) for row in rows]
    found = algorithm.advantages(
        [Group(trajectories=tuple(episodes), rows=rows)], {"values": nothing, "next_values": nothing}
    )
    assert [column[4] for column in found.returns] == [4.0, 3.0, 5.0]


def test_an_agent_is_not_credited_with_what_may_be_anothers():
    """Two agents are rewarded, and a name is missing: of which of the two it is, is not known."""
    episode = by_steps(0, 1.0, None)
    two = replace(episode, episode=replace(episode.episode, rewards={"a": 0.5, "b": 0.5}))
    group = [two, by_steps(1, 1.0, 4.0)]
    assert with_missing_rewards(group, GRPOConfig(credit="agent"))[0] is two
    assert with_missing_rewards(group, GRPOConfig())[0].episode.rewards == {"a": 4.5, "b": 0.5}


def test_an_episode_without_names_changes_nothing_of_the_others():
    plain = make_trajectory(0, 1, 7.0, [make_chat("train-000000-01")])
    found = made(advantage_scale="none").returns([by_steps(0, 1.0, None), plain, by_steps(2, 1.0, 8.0)])
    assert [of.values[of.key_of[0]] for of in found] == [1.0 + 8.0 * 1.0, 7.0, 1.0 + 8.0]


def test_gdpo_is_of_rewards_of_episodes():
    with pytest.raises(ConfigError, match=r"needs.*'episode'"):
        made(advantage_scale="gdpo", credit="step")


@pytest.mark.parametrize("plain", [1.0, 5.0])
def test_an_episode_with_one_reward_adds_nothing_to_those_with_rewards_by_name(plain):
    """The reward without a name is no name that others lack; in three of four episodes it would outweigh theirs."""
    mixed = [[{"right": 1.0}, plain, {"right": 0.0}, 0.0]]
    rewards = np.array([1.0, plain, 0.0, 0.0])
    np.testing.assert_allclose(advantages(made(advantage_scale="none"), mixed)[0], rewards - rewards.mean())
    np.testing.assert_allclose(
        advantages(made(advantage_scale="none"), [[{"right": 1.0}, 5.0, 5.0, 5.0]])[0], [-3.0, 1.0, 1.0, 1.0]
    )


@pytest.mark.parametrize("scale", ["std", "none", "gdpo"])
def test_equal_rewards_with_and_without_a_name_teach_nothing(scale):
    (group,) = groups_of([[{"right": 1.0}, 1.0]])
    assert made(advantage_scale=scale).learns_from(group.trajectories) is False


def test_gdpo_compares_rewards_without_names_within_their_group_too():
    """A good group and a bad one: without the group's baseline every episode of the good one would be praised."""
    rewards = np.array([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    each = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    wanted = (each - each.mean()) / (each.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(advantages(made(advantage_scale="gdpo"), rewards.tolist()), wanted, atol=1e-6)


def test_gdpo_normalises_a_group_without_names_beside_one_with_names():
    found = advantages(made(advantage_scale="gdpo"), [[100.0, 101.0], [{"right": 1.0}, {"right": 0.0}]])
    np.testing.assert_allclose(found, [[-1.0, 1.0], [1.0, -1.0]] * np.array(np.sqrt(0.75)), atol=1e-3)


@pytest.mark.parametrize("group", [[0.1, 0.2, 0.7], [0.1, 0.3, 0.6, 0.8, 0.9]])
def test_gdpo_learns_nothing_from_the_rounding_of_rewards_that_cancel_out(group):
    named = [[{"a": share, "b": round(1.0 - share, 1)} for share in group]]
    algorithm = made(advantage_scale="gdpo")
    assert algorithm.learns_from(groups_of(named)[0].trajectories) is False
    assert not advantages(algorithm, named).any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_rewards_that_add_up_to_the_same_teach_nothing_though_their_last_digits_differ(name):
    """0.1 + 0.2 is 0.30000000000000004."""
    (group,) = groups_of([[{"a": 0.1, "b": 0.2}, {"a": 0.3, "b": 0.0}, {"a": 0.0, "b": 0.3}]])
    assert made(name).learns_from(group.trajectories) is False
    (group,) = groups_of([[{"a": 0.1, "b": 0.2}, {"a": 0.3, "b": 1e-9}]])
    assert made(name).learns_from(group.trajectories) is True


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_gdpo_is_refused_where_a_critic_is_the_baseline(name):
    with pytest.raises(ConfigError, match="advantage_scale"):
        made(name, advantage_scale="gdpo")


ALONE = [[{"right": 1.0, "short": 1.0}], [{"right": 1.0, "short": 3.0}], [{"right": 1.0, "short": None}]]


@pytest.mark.parametrize("credit", ["episode", "step", "agent", "branch"])
def test_in_groups_of_one_a_reward_that_was_not_scored_counts_as_the_mean_of_the_batch(credit):
    """As a 0 the third episode would be the worst of the batch."""
    low, high, unscored = advantages(made("reinforce_pp", credit=credit), ALONE)[:, 0]
    assert unscored == pytest.approx(0.0, abs=1e-6)
    assert low < 0 < high
    scored = [ALONE[0], ALONE[1], [{"right": 1.0, "short": 2.0}]]
    for name in ("reinforce_pp", "rae"):
        np.testing.assert_allclose(
            advantages(made(name, credit=credit), ALONE), advantages(made(name, credit=credit), scored), atol=1e-6
        )


def test_a_critic_learns_the_mean_of_the_batch_where_a_group_of_one_was_not_scored():
    algorithm, groups = made("ppo", advantage_scale="none"), groups_of(ALONE)
    nothing = [np.where(row.loss_mask, 0.0, np.nan).astype(np.float32) for group in groups for row in group.rows]
    found = algorithm.advantages(groups, {"values": nothing, "next_values": nothing})
    assert [column[4] for column in found.returns] == [1.25, 1.75, 1.5]


def test_a_name_that_a_task_does_not_have_or_that_no_episode_was_scored_for_counts_nothing():
    named = [[{"right": 1.0}], [{"right": 0.0}], [{"other": 5.0}]]
    plain = [[1.0], [0.0], [5.0]]
    np.testing.assert_allclose(advantages(made("reinforce_pp"), named), advantages(made("reinforce_pp"), plain))
    unscored = [[{"right": 1.0, "short": None}], [{"right": 0.0, "short": None}], [{"other": 5.0}]]
    np.testing.assert_allclose(advantages(made("reinforce_pp"), unscored), advantages(made("reinforce_pp"), plain))
