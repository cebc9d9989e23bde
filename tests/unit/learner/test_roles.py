"""Mean rewards by role, and wins by past version."""

from __future__ import annotations

from palestra.config import PoolConfig, Roles
from palestra.learner.reporting import MOST_AGENTS, role_metrics
from palestra.types.records import Trajectory
from unit.building import make_episode

ROLES = Roles(default="white", named={"opponent": "white"}, pools={"opponent": PoolConfig()})


def played(rewards, **players) -> Trajectory:
    return Trajectory(episode=make_episode(rewards=rewards, players=players), steps=())


def test_means_by_agent_and_wins_by_version():
    found = role_metrics(
        [
            played({"agent": 1.0, "opponent": 0.0}, opponent="white@5"),
            played({"agent": 0.0, "opponent": 1.0}, opponent="white@5"),
            played({"agent": 0.5, "opponent": 0.5}, opponent="white@10"),
            played({"agent": 1.0, "opponent": 0.0}, opponent="white"),
            played({"agent": 9.0}),
        ],
        ROLES,
    )
    assert found == {
        "rollout/reward/agent": 0.625,
        "rollout/reward/opponent": 0.375,
        "rollout/pool/white@10/episodes": 1.0,
        "rollout/pool/white@10/win_rate": 0.5,
        "rollout/pool/white@5/episodes": 2.0,
        "rollout/pool/white@5/win_rate": 0.5,
    }


def test_an_agent_alone_subagents_and_a_crowd_make_no_columns():
    assert (
        role_metrics([played({"agent": 1.0}), played({"agent": 1.0, "agent/solver-1": 2.0})], Roles(default="p")) == {}
    )
    crowd = {f"a{n:03}": 1.0 for n in range(100)}
    assert len(role_metrics([played(crowd)], Roles(default="p"))) == MOST_AGENTS
