"""What one of several policies is trained on depends on no other one, and every sampled token is trained once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import make_chat, make_trajectory

from palestra.algorithms.registry import create_algorithm
from palestra.config import GRPOConfig, ReinforcePPConfig, Roles
from palestra.learner.batch import Batch, make_batch
from palestra.learner.shares import share_of, shares_of
from palestra.types.calls import AgentStepReward, PolicyVersion
from palestra.types.records import Trajectory

pytestmark = pytest.mark.ci

POLICIES = ("white", "black", "grey", "old")  # the last one is never trained
NAMED = {"black": "black", "grey": "grey", "grey/helper": "white", "old": "old"}
AGENTS = ("agent", "black", "grey", "grey/helper", "old")
ALGORITHMS = [GRPOConfig(credit=credit) for credit in ("episode", "step", "team-step", "agent", "branch")] + [
    ReinforcePPConfig()
]


def roles_of(*rivals: str) -> Roles:
    frozen = frozenset(POLICIES) - set(rivals)
    return Roles(default="white", named=NAMED, frozen=frozen, rivals=rivals)


@st.composite
def episodes(draw: st.DrawFn, group: int, sample: int) -> Trajectory:
    """Turns of any agents, each with a reward of any agent."""
    name = f"train-{group:06d}-{sample:02d}"
    turns = draw(st.lists(st.sampled_from(AGENTS), min_size=1, max_size=5))
    earned = st.lists(st.tuples(st.sampled_from(AGENTS), st.sampled_from([-1.0, 0.0, 0.5, 1.0])), max_size=3)
    chats, by_agent = [], []
    for step, agent in enumerate(turns):
        tokens = tuple(1000 * group + 100 * sample + 10 * step + n for n in range(draw(st.integers(1, 3))))
        policy = NAMED.get(agent, "white")
        chats.append(
            make_chat(episode_id=name, index=step, time_step=step, completion=tokens, policy=policy, agent=agent)
        )
        by_agent += [AgentStepReward(step, one, reward) for one, reward in draw(earned)]
    rewards: Counter[str] = Counter()
    steps = [0.0] * len(turns)
    for step, agent, reward in by_agent:
        rewards[agent] += reward  # type: ignore[assignment]
        steps[step] += reward
    played = make_trajectory(group, sample, 0.0, chats)
    return replace(
        played,
        episode=replace(
            played.episode, rewards=dict(rewards), step_rewards=tuple(steps), agent_step_rewards=tuple(by_agent)
        ),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    return [draw(episodes(group, sample)) for group in range(draw(st.integers(1, 2))) for sample in range(3)]


def batch_of(trajectories: list[Trajectory], config: GRPOConfig, policy: str, roles: Roles) -> Batch:
    algorithm = create_algorithm(config)
    batch = make_batch(trajectories, algorithm, 16, PolicyVersion(0, 0), policy, roles)
    return batch.with_advantages(algorithm.advantages(batch.groups, {}), {}) if batch.samples else batch


def columns_of(batch: Batch) -> list[tuple]:
    return [
        (row.episode_id, *(getattr(row, name).tolist() for name in ("ids", "loss_mask", "advantages", "loss_weights")))
        for row in batch.samples
    ]


def tokens_of(batch: Batch) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for row in batch.samples:
        found.update((row.episode_id, int(token)) for token in row.ids[row.loss_mask])
    return found


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda config: f"{config.name} {config.credit}")
@examples(15, 300)
@given(played=batches())
def test_the_rows_of_a_policy_depend_on_no_other_one(config, played):
    wanted = columns_of(batch_of(played, config, "white", roles_of("white", "black", "grey")))
    for rivals in (("white", "black"), ("grey", "white"), ("grey", "black", "white")):
        assert columns_of(batch_of(played, config, "white", roles_of(*rivals))) == wanted
    # Nor on what others have earned or said, as long as they were there.
    other = [
        replace(
            one,
            episode=replace(
                one.episode,
                rewards={a: r if a in mine else 7.0 for a, r in one.episode.rewards.items()},
                agent_step_rewards=tuple(
                    each if each.agent in mine else each._replace(reward=7.0) for each in one.episode.agent_step_rewards
                ),
            ),
        )
        for one in played
        for mine in [roles_of("white", "black").rewards_of("white", one.episode.rewards)]
    ]
    assert columns_of(batch_of(other, config, "white", roles_of("white", "black"))) == wanted


@examples(15, 300)
@given(played=batches(), rivals=st.permutations(POLICIES[:3]))
def test_every_sampled_token_of_trained_policies_is_trained_once(played, rivals):
    config = ReinforcePPConfig()  # learns from every group
    found: Counter[tuple[str, int]] = Counter()
    for policy in rivals:
        found += tokens_of(batch_of(played, config, policy, roles_of(*rivals)))
    sampled = Counter(
        (chat.episode_id, int(token))
        for one in played
        for chat in one.chats
        if chat.policy in rivals
        for token in chat.completion_ids
    )
    assert found == sampled


@examples(15, 300)
@given(played=batches())
def test_rewards_of_an_action_are_shared_out_among_those_who_have_earned_them(played):
    rivals = ("white", "black", "grey")
    for one in played:
        shares = {policy: share_of(one, policy, roles_of(*rivals)) for policy in rivals}
        for policy, share in shares.items():
            own = roles_of(*rivals).rewards_of(policy, one.episode.rewards)
            assert share.episode.rewards == own
            assert np.isclose(sum(share.episode.step_rewards), sum(own.values()))
            assert {chat.policy for chat in share.chats} <= {policy}
        assert [t.episode.episode_id for t in shares_of([one], "white", roles_of(*rivals))] == [
            one.episode.episode_id
        ] * bool(shares["white"].steps or shares["white"].episode.rewards)
