"""One policy plays both sides of a game: what the runner records, and what each call then answers for."""

from __future__ import annotations

import hashlib

import pytest

from palestra.algorithms.registry import create_algorithm
from palestra.config import GRPOConfig, PPOConfig
from palestra.learner.batch import make_batch
from palestra.rollout import RolloutSpec
from palestra.runners import Runner
from palestra.session import Sessions
from palestra.types.calls import PolicyVersion
from palestra.types.records import Task, Trajectory
from palestra_worlds.poker import KuhnPoker
from unit.session.conftest import STOP


@pytest.fixture
async def games(bench) -> list[Trajectory]:
    """Games of Kuhn poker of two and of three moves."""
    numbers = iter(range(10**6))
    bench.script = lambda prompt, sampling: [b"pb"[hashlib.sha256(b"%d" % next(numbers)).digest()[0] % 2], STOP]
    await bench.store.groups.register("train", 1, 1, Task(task_id="t", data={"seed": 3}), 24)
    runner = Runner(Sessions(bench.context, 10), RolloutSpec(environment=KuhnPoker))
    played = [await runner.play_episode() for _ in range(1 + 24)]  # the fixture has registered one more
    return played[1:]


async def test_each_call_of_self_play_earns_what_its_own_side_is_paid(bench, games):
    algorithm = create_algorithm(GRPOConfig(credit="step"))
    seen = set()
    for game in games:
        (found,) = algorithm.returns([game])
        for chat in game.chats:
            assert found.values[found.key_of[chat.index]] == game.episode.rewards[chat.agent]
        assert game.episode.reward == 0
        seen.add(len(game.chats))
    assert seen == {2, 3}, "games of two and of three moves are played"


@pytest.mark.parametrize("discount", [1.0, 0.5])
async def test_the_critic_of_self_play_learns_what_each_side_is_paid(bench, games, discount):
    config = PPOConfig(gae_lambda=1.0, discount=discount, advantage_scale="none")
    algorithm = create_algorithm(config)
    roles = bench.context.policies.roles
    batch = make_batch(games, algorithm, 50, PolicyVersion(0, 0), "policy", roles)
    zeros = [0 * sample.logprobs for sample in batch.samples]
    found = algorithm.advantages(batch.groups, {"values": zeros, "next_values": zeros})
    episodes = {game.episode.episode_id: game for game in games}
    checked = 0
    for sample, returns in zip(batch.samples, found.returns, strict=True):
        game = episodes[sample.episode_id]
        calls = {chat.index: chat for chat in game.chats}
        for place in sample.loss_mask.nonzero()[0]:
            chat = calls[int(sample.calls[place])]
            # A role is paid for its own last move.
            left = max(one.time_step for one in game.chats if one.agent == chat.agent) - chat.time_step
            assert returns[place] == pytest.approx(discount**left * game.episode.rewards[chat.agent])
            checked += 1
    assert checked == sum(len(chat.completion_ids) for game in games for chat in game.chats)
