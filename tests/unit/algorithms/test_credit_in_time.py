"""Rewards by agent and by time: a game of three moves, every algorithm that has the credit, all numbers by hand.

White moves, black moves, white moves. The moves pay white 1; black 2 and white -1; white 4 and black -3. With a
discount of 1/2, white's returns are 1 - 1/2 + 4/4 = 1.5 and 4, black's is 2 - 3/2 = 0.5. Both together
are paid 1 by each move.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from palestra.algorithms import batch_baselines
from palestra.algorithms.base import Group
from palestra.algorithms.credit import agent_reward
from palestra.algorithms.policy_gradient import PolicyGradient
from palestra.algorithms.registry import ALGORITHMS, create_algorithm
from palestra.config import GRPOConfig, PPOConfig, Roles, parse_config
from palestra.learner.shares import share_of
from palestra.types.calls import AgentStepReward, StepTimes
from palestra.types.records import Trajectory
from unit.algorithms.test_gae import columns, played, trained
from unit.algorithms.test_sac import SINGLE, episode, flat_forward, learned, sac, soft
from unit.building import make_episode

EARNED = [(0, "white", 1.0), (1, "black", 2.0), (1, "white", -1.0), (2, "white", 4.0), (2, "black", -3.0)]
MOVES = ["white", "black", "white"]
OWN, POOLED = [1.5, 0.5, 4.0], [1.75, 1.5, 1.0]  # returns of the three moves
SELF_PLAY = Roles(default="both")
TWO = Roles(default="white", named={"white": "white", "black": "black"}, rivals=("white", "black"))
CONFIGS = {name: get_type_hints(made)["config"].model_fields for name, made in ALGORITHMS.items()}
WITH_STEP = [
    name for name, keys in CONFIGS.items() if "credit" in keys and "step" in get_args(keys["credit"].annotation)
]
CRITICS = ("ppo", "a2c")
STD = {"white": math.sqrt(5.34375) + 1e-4, "black": math.sqrt(0.125) + 1e-4}  # see `wanted_of`


def made(name: str, credit: str = "step", **settings):
    return create_algorithm(
        parse_config({"algorithm": {"name": name, "credit": credit, "discount": 0.5, **settings}}).algorithm
    )


def record(earned) -> dict:
    rewards = {agent: sum(r for _, one, r in earned if one == agent) for _, agent, _ in earned}
    steps = tuple(sum(r for step, _, r in earned if step == n) for n in range(3))
    return {
        "rewards": rewards,
        "step_rewards": steps,
        "agent_step_rewards": tuple(AgentStepReward(*one) for one in earned),
    }


def game(roles: Roles = SELF_PLAY, earned=EARNED, moves=MOVES, sample: int = 0):
    """An episode of three calls of one token, as its policies play it, and its rows."""
    name = f"train-000000-{sample:02d}"
    one, rows = played([(agent, 1) for agent in moves], **record(earned))
    chats = [replace(chat, episode_id=name, policy=roles.policy_of(chat.agent)) for chat in one.chats]
    steps = tuple(replace(step, chats=(chat,)) for step, chat in zip(one.steps, chats, strict=True))
    one = Trajectory(episode=replace(one.episode, episode_id=name, sample_index=sample), steps=steps)
    return one, [replace(row, episode_id=name) for row in rows]


def shares(one: Trajectory, roles: Roles) -> list[tuple[Trajectory, list[int]]]:
    """What each trained policy learns of an episode, with the numbers of its moves."""
    return [
        (share, [chat.index for chat in share.chats])
        for policy in roles.rivals or (roles.default,)
        for share in [share_of(one, policy, roles)]
    ]


def returns_of(algorithm, share: Trajectory) -> list[float]:
    (found,) = algorithm.returns([share])
    return [found.values[found.key_of[chat.index]] for chat in share.chats]


def test_the_oracle_has_every_algorithm():
    assert set(WITH_STEP) == {
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "rloo",
        "reinforce_pp",
        "rae",
        *CRITICS,
        "sac",
    }


@pytest.mark.parametrize("roles", [SELF_PLAY, TWO], ids=["self-play", "two policies"])
@pytest.mark.parametrize("name", [name for name in WITH_STEP if issubclass(ALGORITHMS[name], PolicyGradient)])
def test_a_move_answers_for_what_its_own_agent_earns_from_then_on(name, roles):
    one, _ = game(roles)
    for share, moves in shares(one, roles):
        assert returns_of(made(name), share) == [OWN[move] for move in moves]
    if roles is SELF_PLAY:
        assert returns_of(made(name, "team-step"), one) == POOLED


def wanted_of(name: str) -> list[float]:
    """Advantages of the three moves beside a second game in which nobody earns anything.

    White's mean is ((1.5 + 4) / 2 + 0) / 2 = 1.375, black's 0.25; variances, in which both games weigh the same, are
    (0.125^2 + 2.625^2) / 2 + 1.375^2 = 5.34375 and 0.25^2 + 0.25^2 = 0.125.
    """
    centred = [0.125, 0.25, 2.625]
    if name == "dr_grpo":
        return centred
    if name == "rloo":  # the other game's mean is 0
        return OWN
    if name == "rae":  # baselines move half of the way first: white's to 0.75 and 2.375, black's to 0.25
        return [0.75, 0.25, 1.625]
    return [value / STD[agent] for value, agent in zip(centred, MOVES, strict=True)]


@pytest.mark.parametrize("name", [name for name in WITH_STEP if name not in (*CRITICS, "sac")])
def test_a_role_is_compared_with_itself(name, monkeypatch):
    monkeypatch.setattr(batch_baselines, "DECAY", 0.5)
    games = [game(), game(earned=[(step, agent, 0.0) for step, agent, _ in EARNED], sample=1)]
    group = Group(trajectories=tuple(one for one, _ in games), rows=tuple(row for _, rows in games for row in rows))
    found = made(name).advantages([group], {})
    assert trained(games[0][1], found.advantages[:3]) == pytest.approx(wanted_of(name), rel=1e-5)
    assert found.metrics["calls_without_peers"] == 0


@pytest.mark.parametrize("roles", [SELF_PLAY, TWO], ids=["self-play", "two policies"])
@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("name", CRITICS)
def test_gae_of_an_agent_has_its_own_rewards(name, level, roles):
    """V = 0.2, 0.3, 0.4 and lambda 1/2; from white's first move to its second the discount is 1/4.

    White earns 1 - 1/2 after its first move and 4 after its second, black 2 - 3/2. So the deltas are
    0.5 + 0.4 / 4 - 0.2 = 0.4, 0.5 - 0.3 = 0.2 and 4 - 0.4 = 3.6, and the first advantage is 0.4 + 3.6 / 8.
    """
    one, rows = game(roles)
    values = columns(rows, [0.2, 0.3, 0.4])
    forward = {"values": values, "next_values": columns(rows, [9.0, 9.0, 9.0])}
    settings = {"gae_lambda": 0.5, "gae_level": level, "advantage_scale": "none"}
    for share, moves in shares(one, roles):
        own = [rows[move] for move in moves]
        group = Group(trajectories=(share,), rows=tuple(own))
        found = made(name, **settings).advantages(
            [group], {output: [column[move] for move in moves] for output, column in forward.items()}
        )
        assert trained(own, found.advantages) == pytest.approx([[0.85, 0.2, 3.6][move] for move in moves], rel=1e-5)
        assert trained(own, found.returns) == pytest.approx([[1.05, 0.5, 4.0][move] for move in moves], rel=1e-5)
    if roles is SELF_PLAY:  # pooled: 1.5, 1.5 and 1 are earned, and the first delta is 1.5 + 0.1 - 0.2
        found = made(name, "team-step", **settings).advantages([Group(trajectories=(one,), rows=tuple(rows))], forward)
        assert trained(rows, found.advantages) == pytest.approx([1.4 + 0.6 / 8, 1.2, 0.6], rel=1e-5)


@pytest.mark.parametrize("roles", [SELF_PLAY, TWO], ids=["self-play", "two policies"])
def test_the_critic_of_sac_learns_an_agents_own_rewards(roles):
    log_pi, targets = [math.log(p) for p in (0.5, 0.3, 0.2)] * 3, [0.1 * n for n in range(9)]
    one, rows = episode(SINGLE, [0, 0, 0], agents=MOVES)
    steps = tuple(
        replace(step, chats=tuple(replace(chat, policy=roles.policy_of(chat.agent)) for chat in step.chats))
        for step in one.steps
    )
    one = Trajectory(episode=replace(one.episode, **record(EARNED)), steps=steps)
    following = 0.25 * soft(log_pi[6:], targets[6:])
    for credit, wanted in (("step", [0.5 + following, 0.5, 4.0]), ("team-step", [1.5 + following, 1.5, 1.0])):
        if credit == "team-step" and roles is TWO:
            continue
        for share, moves in shares(one, roles):
            own = [row for row in rows if int(row.calls.max()) in moves]
            places = [3 * move + choice for move in moves for choice in range(3)]
            forward = flat_forward(
                own, [log_pi[place] for place in places], [0.0] * len(own), [targets[place] for place in places]
            )
            found = learned(sac(discount=0.5, credit=credit), share, own, forward)
            assert list(found.values()) == pytest.approx([wanted[move] for move in moves], rel=1e-5)


AT_ONCE = (StepTimes(0.0, 2.0), StepTimes(0.1, 1.0), StepTimes(2.5, 4.0), StepTimes(2.6, 3.0))


@pytest.mark.parametrize(
    ("times", "pooled"),
    [
        pytest.param(AT_ONCE, [11.0, 11.0, 8.0, 8.0], id="two rounds at the same time"),
        pytest.param(None, [11.0, 10.0, 8.0, 5.0], id="one after another"),
        pytest.param(
            tuple(StepTimes(float(n), n + 1.0) for n in range(4)), [11.0, 10.0, 8.0, 5.0], id="turns with times"
        ),
    ],
)
def test_agents_that_act_at_the_same_time_share_what_their_round_earns(times, pooled):
    """White and black move at the same time, twice. White earns 1 and 3, black 2 and 5."""
    moves = ["white", "black"] * 2
    one, rows = played(
        [(agent, 1) for agent in moves],
        rewards={"white": 4.0, "black": 7.0},
        step_rewards=(1.0, 2.0, 3.0, 5.0),
        agent_step_rewards=tuple(AgentStepReward(n, moves[n], r) for n, r in enumerate((1.0, 2.0, 3.0, 5.0))),
        step_times=times,
    )
    assert returns_of(create_algorithm(GRPOConfig(credit="team-step")), one) == pooled
    assert returns_of(create_algorithm(GRPOConfig(credit="step")), one) == [4.0, 7.0, 3.0, 5.0]
    zeros = columns(rows, [0.0] * 4)
    for credit, wanted in (("team-step", pooled), ("step", [4.0, 7.0, 3.0, 5.0])):
        ppo = create_algorithm(PPOConfig(credit=credit, gae_lambda=1.0, advantage_scale="none"))
        found = ppo.advantages([Group(trajectories=(one,), rows=tuple(rows))], {"values": zeros, "next_values": zeros})
        assert trained(rows, found.advantages) == pytest.approx(wanted)


PLANNER = ["planner", "planner/search", "planner"]
BOTH_PAID = [(1, "planner/search", 1.0), (2, "planner", 4.0)]


@pytest.mark.parametrize(
    ("earned", "own", "pooled"),
    [
        pytest.param(BOTH_PAID, [1.0, 1.0, 4.0], [1.5, 3.0, 4.0], id="both are paid"),
        pytest.param([(0, "planner", 2.0), (2, "planner", 4.0)], [3.0, 2.0, 4.0], [3.0, 2.0, 4.0], id="one is paid"),
    ],
)
def test_a_planner_answers_for_its_subagents_where_the_rewards_are_pooled(earned, own, pooled):
    one, rows = game(earned=earned, moves=PLANNER)
    assert returns_of(made("grpo"), one) == own
    assert returns_of(made("grpo", "team-step"), one) == pooled
    zeros = columns(rows, [0.0] * 3)
    for credit, wanted in (("step", own), ("team-step", pooled)):
        ppo = made("ppo", credit, gae_lambda=1.0, advantage_scale="none")
        found = ppo.advantages([Group(trajectories=(one,), rows=tuple(rows))], {"values": zeros, "next_values": zeros})
        assert trained(rows, found.advantages) == pytest.approx(wanted)


def test_subagents_are_compared_with_all_that_their_parent_has_started():
    games = [game(earned=[(1, "planner/a", 1.0), (2, "planner", 0.0)], moves=["planner", "planner/a", "planner"])[0]]
    games += [
        game(earned=[(1, "planner/b", 3.0), (2, "planner", 0.0)], moves=["planner", "planner/b", "planner"], sample=1)[
            0
        ]
    ]
    (found,) = made("dr_grpo").estimate([made("dr_grpo").returns(games)])
    assert [by_call[1] for by_call in found.by_call] == [-1.0, 1.0]
    assert found.calls_without_peers == 0


@pytest.mark.parametrize("steps", [None, (0.0, 0.0, 0.0), (5.0, 0.0, -5.0)])
def test_where_it_is_not_known_whose_a_timesteps_reward_is_an_agent_earns_its_own_at_the_end(steps):
    one, _ = game()
    one = replace(one, episode=replace(one.episode, step_rewards=steps, agent_step_rewards=None))
    assert returns_of(made("grpo"), one) == [4.0 / 4, -1.0 / 2, 4.0]


@pytest.mark.parametrize("steps", [None, (0.0, 0.0, 1.0)])
def test_an_agent_that_was_not_paid_has_earned_nothing(steps):
    """The winner alone is paid."""
    by_agent = None if steps is None else (AgentStepReward(2, "white", 1.0),)
    one = replace(
        game()[0],
        episode=make_episode(rewards={"white": 1.0}, step_rewards=steps, agent_step_rewards=by_agent),
    )
    assert returns_of(made("grpo"), one) == [0.25, 0.0, 1.0]
    assert [returns_of(made("grpo", credit), one) for credit in ("agent", "branch")] == [[1.0, 0.0, 1.0]] * 2
    assert returns_of(made("grpo", "team-step"), one) == [0.25, 0.5, 1.0]


def test_a_reward_that_names_no_agent_is_that_of_each():
    one = replace(game()[0], episode=make_episode(rewards={"agent": 1.0}, step_rewards=(0.0, 0.5, 0.5)))
    assert returns_of(made("grpo"), one) == [0.375, 0.75, 0.5]
    assert agent_reward("white", one.episode) == 1.0
    # An environment that has roles has paid the one with this name.
    paid = replace(one.episode, agent_step_rewards=(AgentStepReward(2, "agent", 1.0),))
    assert agent_reward("white", paid) == 0.0


def test_what_was_not_scored_is_earned_by_who_has_the_reward():
    """The mean of what was scored is added in the last TimeStep, also where it is recorded by agent."""
    episodes = []
    for sample, given in enumerate((1.0, None)):
        paid = (AgentStepReward(2, "white", given or 0.0),)
        made_episode = make_episode(
            0,
            sample,
            rewards={"white": given or 0.0},
            step_rewards=(0.0, 0.0, given or 0.0),
            agent_step_rewards=paid,
            named_rewards={"right": given},
        )
        episodes.append(replace(game()[0], episode=made_episode))
    algorithm = create_algorithm(GRPOConfig(credit="step"))
    found = algorithm.returns(episodes)
    assert [sorted(each.values.values()) for each in found] == [[0.0, 1.0, 1.0]] * 2


def test_steps_by_agent_count_as_credit_of_agents():
    assert PPOConfig().credits_agents
    assert not PPOConfig(credit="team-step").credits_agents
