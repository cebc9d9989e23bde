"""Games of several agents, played by a real model that is trained."""

from __future__ import annotations

import pytest

import palestra
from palestra import JobConfig
from palestra.store.browsing import browse, read_episode


def config(folder, **changes) -> JobConfig:
    policy = {"model": "tiny-random", "max_context": 64}
    return JobConfig.model_validate(
        {
            "name": "games",
            "steps": 2,
            "deterministic": True,
            "run_dir": folder,
            "server": {"port": 0},
            "policies": {"white": policy, "black": policy | {"frozen": True}},
            "roles": {"second": "black"},
            "rollout": {"group_size": 4, "groups_per_step": 4},
            "evaluation": {"every_steps": 0},
            "engine": {"threads": 1},
            "trainer": {"threads": 1},
        }
        | changes
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kuhn-poker"])
def test_an_untrained_model_makes_nothing_but_legal_moves(name, tmp_path):
    result = palestra.train(config=config(tmp_path), environment=name)
    assert len(result.metrics) == 2
    episodes = palestra.read_episodes(result.run_dir)
    assert len(episodes) == 32
    assert {episode.state for episode in episodes} == {"completed"}
    assert all(sum(episode.rewards.values()) == 0 for episode in episodes)
    with browse(result.run_dir / "run.db") as connection:
        chats = [chat for one in episodes for chat in read_episode(connection, one.episode_id).trajectory.chats]
    assert {chat.agent for chat in chats} == {"first", "second"}
    assert all(len(chat.completion_ids) == 2 for chat in chats), "a move, and the end of the reply"
    assert {chat.reply.text for chat in chats} == {"p", "b"}


@pytest.mark.slow
def test_a_named_environment_plays_the_tasks_that_are_given(tmp_path):
    given = [{"id": f"deal-{number}", "seed": number} for number in range(3)]
    settings = config(tmp_path / "given", steps=1, evaluation={"every_steps": 1}, environment={"validation_tasks": 2})
    result = palestra.train(tasks=given, config=settings, environment="kuhn-poker", quiet=True)
    episodes = palestra.read_episodes(result.run_dir)
    trained = {episode.task_id for episode in episodes if episode.kind == "train"}
    assert trained == {"deal-0", "deal-1", "deal-2"}
    validated = {episode.task_id for episode in episodes if episode.kind == "validation"}
    assert len(validated) == 2
    assert all(name.startswith("kuhn-") for name in validated), "the environment's own"
