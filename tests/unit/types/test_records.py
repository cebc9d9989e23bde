from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from palestra.types.calls import PolicyVersion
from unit.building import make_chat, make_episode, make_trajectory


def test_versions_are_ordered_by_incarnation_and_then_by_update():
    versions = [PolicyVersion(1, 0), PolicyVersion(0, 9), PolicyVersion(0, 10)]
    assert [str(v) for v in sorted(versions)] == ["0.9", "0.10", "1.0"]


def test_the_reward_is_the_sum_over_agents_and_none_is_not_zero():
    assert make_episode(reward=None).reward is None
    assert make_episode(rewards={"a": 0.5, "b": -2.0}).reward == -1.5
    assert make_episode(rewards={}).reward == 0.0


def test_records_can_not_be_changed():
    with pytest.raises(FrozenInstanceError):
        make_episode().rewards = {}
    with pytest.raises(FrozenInstanceError):
        make_chat().sampling.seed = 3
    with pytest.raises(AttributeError):
        make_chat().other = 3  # a session fills in a call's reply, and adds nothing


def test_the_calls_of_a_trajectory_are_those_of_its_steps():
    chats = [make_chat(index=i, prompt=(i + 1,)) for i in range(3)]
    assert make_trajectory(0, 0, 1.0, chats).chats == tuple(chats)
