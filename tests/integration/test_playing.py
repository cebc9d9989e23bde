"""`palestra.train` and `palestra.play` with agents and environments of the user, in one process."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import openai
import pytest
from servers import PALESTRA

import palestra
from palestra import JobConfig, Play
from palestra.agents import ModelAgent
from palestra.envs import Environment, Gomoku
from palestra.errors import ConfigError, RolloutFailed
from palestra.ledger.browsing import browse, list_episodes
from palestra.trainer.recording import RecordingTrainer

SCRIPTED = {"engine": {"kind": "scripted", "scripted_tokens": 6}, "server": {"port": 0}}


class Echo(Environment):
    """The reward is the number of digits in the reply; the second of two turns ends it."""

    blocking = False
    system = "Count."

    def reset(self, task):
        if task["text"] == "broken":
            raise ConnectionError("no network")
        self.turns, self.reward = 0, 0.0
        return task["text"], {}

    def step(self, action):
        self.turns += 1
        return "again", float(len(action)), self.turns == 2, False, {}


def job(folder, **more) -> JobConfig:
    return JobConfig.model_validate(
        {
            "run_dir": str(folder),
            "steps": 2,
            "deterministic": True,
            "rollout": {"group_size": 3, "groups_per_step": 2},
            "checkpoint": {"every_steps": 2},
            **SCRIPTED,
            **more,
        }
    )


TASKS = [{"text": f"task {number}"} for number in range(4)]


async def rollout(task, policy):
    """The same over HTTP."""
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": task["text"]}]
    reward = 0.0
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        for _ in range(2):
            reply = (await client.chat.completions.create(model=policy.model, messages=messages)).choices[0].message
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "again"}]
            reward += len(reply.content or "")
    return reward


def test_an_environment_is_trained_on_exactly_as_the_same_agent_over_http(tmp_path):
    inside = palestra.train(Play(environment=Echo), TASKS, job(tmp_path / "inside"), quiet=True)
    outside = palestra.train(rollout, TASKS, job(tmp_path / "outside"), quiet=True)
    assert inside.state == outside.state == "completed"
    assert (inside.checkpoint / "weights.txt").read_text() == (outside.checkpoint / "weights.txt").read_text()
    for one, other in zip(inside.metrics, outside.metrics, strict=True):
        assert one.get("train/reward_mean") == other.get("train/reward_mean")
        assert one.get("train/trained_tokens") == other.get("train/trained_tokens")


def test_a_tiny_model_plays_a_game_and_is_trained_on_moves_that_it_was_held_to(tmp_path):
    moves = tuple(f"{row} {column}" for row in (1, 2, 3) for column in (1, 2, 3))
    play = Play(environment=Gomoku, agents={"": ModelAgent(choices=moves)})
    policy = {"policy": {"model": "tiny-random", "max_context": 512, "sampling": {"max_tokens": 8}}}
    more = {"engine": {"threads": 1}, "trainer": {"threads": 1}, "policies": policy}
    found = [
        palestra.train(play, [{"seed": n} for n in range(4)], job(tmp_path / str(run), **more), quiet=True)
        for run in range(2)
    ]
    first, second = ((result.checkpoint / "model.safetensors").read_bytes() for result in found)
    assert first == second
    row = found[0].metrics[-1]
    assert row["train/trained_tokens"] > 0
    assert row["train/logprob_gap_mean"] < 0.02
    with browse(tmp_path / "0" / "run.db") as connection:
        played = list_episodes(connection, "train", "completed", 100)
    assert {episode.metadata["termination"] for episode in played} == {"done"}


def test_a_tiny_model_that_has_to_call_a_tool_does_nothing_else(tmp_path):
    ring = {"type": "function", "function": {"name": "ring", "parameters": {"type": "object", "properties": {}}}}
    play = Play(environment=Echo, agents={"": ModelAgent(tools=(ring,), tool_choice="required")})
    policy = {"policy": {"model": "tiny-random", "max_context": 2048, "sampling": {"max_tokens": 600}}}
    found = palestra.play(play, TASKS, job(tmp_path, engine={"threads": 1}, policies=policy))
    for outcome in found:
        assert [chat.finish_reason for chat in outcome.result.chats] == ["stop", "stop"]
        for chat in outcome.result.chats:
            assert {call.function.name for call in chat.reply.tool_calls} == {"ring"}
            assert chat.reply.text == ""


def test_playing_without_training_keeps_order_and_says_what_failed(tmp_path):
    tasks = [{"text": "a"}, {"text": "broken"}, {"text": "b"}, {"text": "a"}]
    found = palestra.play(Play(environment=Echo), tasks, job(tmp_path / "run"), concurrency=2)
    assert [outcome.work for outcome in found] == tasks
    assert isinstance(found[1].error, RolloutFailed)
    assert found[1].result is None
    assert [outcome.result.chats[0].messages[-1].text for outcome in (found[0], found[2], found[3])] == ["a", "b", "a"]
    assert all(outcome.result.episode.reward == sum(outcome.result.episode.step_rewards) for outcome in found[2:])
    with browse(tmp_path / "run" / "run.db") as connection:
        assert len(list_episodes(connection, "adhoc", "completed", 100)) == 3


def test_playing_goes_on_in_a_folder_that_has_played_or_trained_before_and_loads_no_trainer(tmp_path, monkeypatch):
    palestra.train(Play(environment=Echo), TASKS, job(tmp_path / "trained"), quiet=True)
    monkeypatch.setattr(RecordingTrainer, "__init__", lambda *_: pytest.fail("a trainer was made"))
    for folder in ("trained", "played", "played"):
        (outcome,) = palestra.play(Play(environment=Echo), TASKS[:1], job(tmp_path / folder))
        assert outcome.error is None
    for folder, played in (("trained", 1), ("played", 2)):
        with browse(tmp_path / folder / "run.db") as connection:
            assert len(list_episodes(connection, "adhoc", "completed", 100)) == played


async def test_it_works_where_an_event_loop_is_running(tmp_path):
    found = await asyncio.to_thread(palestra.play, Play(environment=Echo), TASKS[:1], job(tmp_path / "thread"))
    assert found[0].error is None
    inside = palestra.play(Play(environment=Echo), TASKS[:1], job(tmp_path / "here"))
    assert inside[0].result.chats[0].completion_ids.tolist() != []


def test_an_environment_that_only_fails_ends_the_training_with_the_reason(tmp_path):
    with pytest.raises(RolloutFailed, match=r"20 episodes in a row failed.*no network"):
        palestra.train(Play(environment=Echo), [{"text": "broken"}], job(tmp_path), quiet=True)


@pytest.mark.parametrize(
    ("arguments", "config", "said"),
    [
        ((None, TASKS), {}, "nothing says what is played"),
        ((Play(environment=Echo), TASKS), {"environment": {"name": "gomoku"}}, "leave one of them out"),
        ((Play(environment=Echo),), {}, "no tasks"),
        ((None,), {"environment": {"name": "gomuku"}}, "did you mean 'gomoku'"),
    ],
)
def test_what_can_not_be_meant_is_refused(tmp_path, arguments, config, said):
    with pytest.raises(ConfigError, match=said):
        palestra.train(*arguments, config=job(tmp_path / "run", **config), quiet=True)


@pytest.mark.slow
def test_the_command_shows_every_environment():
    def shown(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PALESTRA, "environments", *arguments], capture_output=True, text=True, check=False)

    names = [line.split()[0] for line in shown().stdout.splitlines() if line and not line.startswith("to train")]
    assert "gomoku" in names
    for name in ("gomoku", "calculator", "subagents", "frozen-lake"):
        assert name in names
        lines = shown(name).stdout.splitlines()
        task = json.loads(next(line for line in lines if line.startswith("task:")).partition(":")[2])
        assert task["id"]
        assert "[user]" in lines
    wrong = shown("gomuku")
    assert wrong.returncode == 2
    assert "did you mean 'gomoku'" in wrong.stderr


def test_the_environment_of_the_documentation_passes_its_check():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    checked, train, _ = code.partition("palestra.train(")
    assert train
    assert "check_environment(Guess" in checked
    exec(compile(checked, "docs/environments.md", "exec"), {})
