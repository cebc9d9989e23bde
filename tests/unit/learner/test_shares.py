"""What one policy learns from an episode in which another one played, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palestra.algorithms.registry import create_algorithm
from palestra.config import GRPOConfig, PoolConfig, Roles
from palestra.learner.batch import Batch, make_batch
from palestra.learner.shares import share_of, shares_of
from palestra.types.calls import PolicyVersion, VersionSpan
from palestra.types.records import Trajectory
from unit.building import SOLE, make_chat, make_trajectory

ROLES = Roles(default="policy", named={"opponent": "old"}, frozen=frozenset({"old"}))


def game(group: int, sample: int, agent: float, opponent: float, **changes) -> Trajectory:
    """Two calls of the trained policy, and two of the frozen one between them; ids of both begin alike."""
    name = f"train-{group:06d}-{sample:02d}"
    mine = make_chat(episode_id=name, prompt=(1, 2), completion=(10 + sample, 11))
    theirs = make_chat(
        episode_id=name, index=1, prompt=(1, 2), completion=(10 + sample, 77, 78), policy="old", agent="opponent"
    )
    again = make_chat(episode_id=name, index=2, parent=mine, prompt=(3,), completion=(12,))
    last = make_chat(
        episode_id=name, index=3, parent=theirs, prompt=(3,), completion=(79,), policy="old", agent="opponent"
    )
    played = make_trajectory(group, sample, agent, [mine, theirs, again, last])
    rewards = {"agent": agent, "opponent": opponent}
    return replace(played, episode=replace(played.episode, rewards=rewards, **changes))


def alone(trajectory: Trajectory) -> Trajectory:
    """The same as if the opponent were not there."""
    steps = tuple(step for step in trajectory.steps if step.chats[0].policy == "policy")
    rewards = {"agent": trajectory.episode.rewards["agent"]}
    return Trajectory(episode=replace(trajectory.episode, rewards=rewards), steps=steps)


def batch_of(trajectories, roles=ROLES, **settings) -> Batch:
    config = GRPOConfig(**settings)
    algorithm = create_algorithm(config)
    batch = make_batch(trajectories, algorithm, 16, PolicyVersion(0, 0), "policy", roles)
    return batch.with_advantages(algorithm.advantages(batch.groups, {}), {})


def same_rows(one: Batch, other: Batch) -> None:
    assert len(one.samples) == len(other.samples) > 0
    for a, b in zip(one.samples, other.samples, strict=True):
        for name in ("ids", "loss_mask", "calls", "advantages", "loss_weights", "versions"):
            assert getattr(a, name).tolist() == getattr(b, name).tolist(), name


@pytest.mark.parametrize("credit", ["episode", "step", "team-step", "agent", "branch"])
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"])
def test_rows_are_those_of_the_same_episodes_without_the_frozen_policy(credit, mode):
    games = [game(0, 0, 1.0, 0.0), game(0, 1, 0.0, 1.0), game(1, 0, 0.5, 0.5), game(1, 1, 1.0, 0.0)]
    found = batch_of(games, credit=credit, loss_agg_mode=mode)
    same_rows(found, batch_of([alone(one) for one in games], SOLE, credit=credit, loss_agg_mode=mode))
    assert {row.policy for row in found.samples} == {"policy"}
    assert sum(int(row.loss_mask.sum()) for row in found.samples) == 4 * 3


def test_what_a_frozen_policy_sampled_is_counted():
    games = [game(0, 0, 1.0, 0.0), game(0, 1, 0.0, 1.0)]
    metrics = batch_of(games).metrics
    assert (metrics["train/calls_frozen"], metrics["train/tokens_frozen"]) == (4.0, 8.0)
    assert metrics["rollout/completion_tokens"] == 2 * (3 + 4)
    without = batch_of([alone(one) for one in games], SOLE).metrics
    assert (without["train/calls_frozen"], without["train/tokens_frozen"]) == (0.0, 0.0)


def test_a_frozen_roles_reward_is_in_no_mean_and_makes_no_difference():
    games = [game(0, 0, 0.5, 1.0), game(0, 1, 0.5, -1.0)]
    found = batch_of(games)
    assert (found.metrics["train/reward_mean"], found.metrics["train/reward_std"]) == (0.5, 0.0)
    assert found.metrics["train/groups_zero_variance"] == 1.0  # although the sums of all rewards differ
    assert found.samples == []
    for credit in ("agent", "branch"):
        assert batch_of(games, credit=credit).samples == []


def test_rewards_that_cancel_out_are_learned_from():
    games = [game(0, 0, 1.0, -1.0), game(0, 1, -1.0, 1.0)]
    found = batch_of(games)
    assert found.metrics["train/reward_std"] == 1.0
    assert [row.advantages[row.loss_mask][0] > 0 for row in found.samples] == [True, False]


def test_an_episode_in_which_only_a_frozen_policy_spoke_has_no_tokens():
    only = game(0, 0, 1.0, 0.0)
    only = replace(only, steps=tuple(step for step in only.steps if step.chats[0].policy == "old"))
    found = batch_of([only, game(0, 1, 0.0, 1.0)])
    assert found.metrics["train/episodes_without_tokens"] == 1.0
    assert {row.episode_id for row in found.samples} == {"train-000000-01"}


def test_staleness_is_that_of_the_trained_policys_tokens():
    fresh = VersionSpan(PolicyVersion(0, 5), 2)
    mine = make_chat(versions=(fresh,))
    theirs = make_chat(index=1, policy="old", agent="opponent")
    games = [make_trajectory(0, sample, float(sample), [mine, theirs]) for sample in range(2)]
    config = GRPOConfig()
    batch = make_batch(games, create_algorithm(config), 16, PolicyVersion(0, 6), "policy", ROLES)
    assert batch.staleness == {1: 4}


def test_where_nothing_is_left_out_it_is_the_episode_itself():
    played = make_trajectory(0, 0, 1.0, [make_chat()])
    assert share_of(played, "policy", SOLE) is played
    assert share_of(played, "policy", ROLES) is played


def test_calls_of_a_worker_that_left_before_it_acted_are_not_trained_and_counted():
    """As if they had never been made, also where a later call goes on from the same tokens."""

    def attempt(sample: int, reward: float, unused: list[int]) -> Trajectory:
        name = f"train-000000-{sample:02d}"
        draft = make_chat(episode_id=name, prompt=(1, 2), completion=(10, 11))
        again = make_chat(episode_id=name, index=1, time_step=0, prompt=(1, 2), completion=(10, 11))
        last = make_chat(episode_id=name, index=2, time_step=1, parent=draft, prompt=(3,), completion=(12, 13))
        calls = [draft, again, last] if unused else [again, replace(last, parent=again)]
        played = make_trajectory(0, sample, reward, calls)
        return replace(played, episode=replace(played.episode, facts={"unused_calls": unused}))

    undisturbed = batch_of([attempt(0, 1.0, []), attempt(1, 0.0, [])], SOLE)
    found = batch_of([attempt(0, 1.0, [0]), attempt(1, 0.0, [])], SOLE)
    for a, b in zip(found.samples, undisturbed.samples, strict=True):
        for column in ("ids", "loss_mask", "advantages", "loss_weights"):
            assert getattr(a, column).tolist() == getattr(b, column).tolist(), column
        assert a.calls.tolist() == b.calls.tolist()
    assert found.metrics["train/calls_abandoned"] == 1
    assert found.metrics["train/tokens_abandoned"] == 2
    assert undisturbed.metrics["train/calls_abandoned"] == 0


@pytest.mark.parametrize("said", [None, "0", [True, "1", 1.0, None, [0]], {"0": 1}])
def test_what_a_worker_says_of_itself_is_no_list_of_calls(said):
    played = make_trajectory(0, 0, 1.0, [make_chat()])
    assert replace(played.episode, facts={"unused_calls": said}).unused_calls == frozenset()


def test_games_of_past_versions_alone_are_not_learned_from_and_are_in_no_mean():
    """One policy, which plays both sides; past versions of it have played one group of games among themselves."""
    pool = {"agent": PoolConfig(latest_share=0.5), "opponent": PoolConfig(latest_share=0.5)}
    roles = Roles(default="policy", named={"agent": "policy", "opponent": "policy"}, pools=pool)

    def played(group: int, sample: int, agent: float, opponent: float, players: dict[str, str]) -> Trajectory:
        made = game(group, sample, agent, opponent, players=players)
        steps = tuple(
            replace(step, chats=tuple(replace(chat, policy=players[chat.agent]) for chat in step.chats))
            for step in made.steps
        )
        return replace(made, steps=steps)

    mixed = {"agent": "policy", "opponent": "policy@0"}
    past = {"agent": "policy@5", "opponent": "policy@0"}
    known = [played(0, 0, 1.0, 0.0, mixed), played(0, 1, 0.0, 1.0, mixed)]
    unknown = [played(1, 0, 9.0, 9.0, past), played(1, 1, 7.0, 7.0, past)]
    assert [share.episode.group_index for share in shares_of([*known, *unknown], "policy", roles)] == [0, 0]
    without, found = (batch_of(games, roles, credit="agent") for games in (known, [*known, *unknown]))
    same_rows(found, without)
    for name in ("reward_mean", "reward_std", "episodes", "groups_zero_variance"):
        assert found.metrics[f"train/{name}"] == without.metrics[f"train/{name}"], name
    assert found.metrics["train/reward_mean"] == 0.5


def test_calls_of_agents_that_are_not_trained_are_left_out_and_counted():
    def with_title(sample: int) -> Trajectory:
        name = f"train-000000-{sample:02d}"
        mine = make_chat(episode_id=name, prompt=(1, 2), completion=(10 + sample, 11))
        title = make_chat(name, index=1, prompt=(9,), completion=(5, 6, 7), agent="agent/auxiliary")
        return make_trajectory(0, sample, float(sample), [mine, title])

    played = [with_title(0), with_title(1)]
    without = [Trajectory(episode=one.episode, steps=one.steps[:1]) for one in played]
    roles = replace(SOLE, untrained=("*/auxiliary",))
    for settings in ({}, {"train_on": "final-branch"}, {"loss_agg_mode": "token-mean"}):
        batch = batch_of(played, roles, **settings)
        same_rows(batch, batch_of(without, **settings))
        assert (batch.metrics["train/calls_abandoned"], batch.metrics["train/tokens_abandoned"]) == (2, 6)
    everything = batch_of(played)
    assert sum(int(row.loss_mask.sum()) for row in everything.samples) == 10


@pytest.mark.parametrize("credit", ["episode", "step", "team-step", "agent"])
def test_what_an_agent_without_a_policy_is_paid_is_not_learned_from(credit):
    """A seat that another job's policy plays, or a random opponent: in a zero-sum game the sum would be 0."""

    def played(sample: int, earned: float, rewards: dict[str, float], **changes) -> Trajectory:
        call = make_chat(episode_id=f"train-000000-{sample:02d}", prompt=(1, 2), completion=(10 + sample, 11))
        one = make_trajectory(0, sample, earned, [call])
        return replace(one, episode=replace(one.episode, rewards=rewards, **changes))

    earned = (1.0, -1.0)
    facts = {"facts": {"without_policy": ["opponent"]}}
    games = [
        played(
            n, sum((e, -e)), {"agent": e, "opponent": -e},
            step_rewards=(0.0,), agent_step_rewards=((0, "agent", e), (0, "opponent", -e)), **facts,
        )
        for n, e in enumerate(earned)
    ]  # fmt: skip
    alone = [played(n, e, {"agent": e}, step_rewards=(e,)) for n, e in enumerate(earned)]
    found = batch_of(games, SOLE, credit=credit)
    same_rows(found, batch_of(alone, SOLE, credit=credit))
    assert found.metrics["train/groups_zero_variance"] == 0
