"""`palestra.train` and `palestra.evaluate` with agents and environments of the user, in one process."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from pathlib import Path

import openai
import pytest
from servers import PALESTRA

import palestra
from palestra import JobConfig, RolloutSpec
from palestra.agents import ModelAgent
from palestra.envs import Environment
from palestra.errors import ConfigError, RolloutFailed
from palestra.store.browsing import browse, list_episodes, read_episode
from palestra.trainer.fake import FakeTrainer
from palestra_worlds import Gomoku

SCRIPTED = {"engine": {"kind": "fake", "reply_tokens": 6}, "server": {"port": 0}}


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


@pytest.mark.slow
def test_an_environment_is_trained_on_exactly_as_the_same_agent_over_http(tmp_path):
    inside = palestra.train(RolloutSpec(environment=Echo), TASKS, job(tmp_path / "inside"), quiet=True)
    outside = palestra.train(rollout, TASKS, job(tmp_path / "outside"), quiet=True)
    assert inside.state == outside.state == "completed"
    assert (inside.checkpoint / "weights.txt").read_text() == (outside.checkpoint / "weights.txt").read_text()
    for one, other in zip(inside.metrics, outside.metrics, strict=True):
        assert one.get("train/reward_mean") == other.get("train/reward_mean")
        assert one.get("train/trained_tokens") == other.get("train/trained_tokens")


@pytest.mark.slow
def test_a_tiny_model_plays_a_game_and_is_trained_on_moves_that_it_was_held_to(tmp_path):
    moves = tuple(f"{row} {column}" for row in (1, 2, 3) for column in (1, 2, 3))
    play = RolloutSpec(environment=Gomoku, agents={"": ModelAgent(choices=moves)})
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


@pytest.mark.slow
def test_a_tiny_model_that_has_to_call_a_tool_does_nothing_else(tmp_path):
    ring = {"type": "function", "function": {"name": "ring", "parameters": {"type": "object", "properties": {}}}}
    play = RolloutSpec(environment=Echo, agents={"": ModelAgent(tools=(ring,), tool_choice="required")})
    policy = {"policy": {"model": "tiny-random", "max_context": 2048, "sampling": {"max_tokens": 600}}}
    config = job(tmp_path, steps=1, engine={"threads": 1}, trainer={"threads": 1}, policies=policy)
    palestra.train(play, TASKS, config, quiet=True)
    with browse(tmp_path / "run.db") as connection:
        found = [
            read_episode(connection, e.episode_id).trajectory for e in list_episodes(connection, "train", None, 99)
        ]
    chats = [chat for trajectory in found for chat in trajectory.chats]
    assert len(chats) >= 2 * 3 * 2  # 2 groups of 3 samples, 2 turns each
    for chat in chats:
        assert chat.finish_reason == "stop"
        assert {call.function.name for call in chat.reply.tool_calls} == {"ring"}
        assert chat.reply.text == ""


def test_one_episode_is_played_and_given_back_with_its_tokens(tmp_path):
    played = palestra.play_episode(Echo, {"text": "a"}, job(tmp_path / "run"))
    assert played.episode.task.data == {"text": "a"}
    assert played.episode.rewards
    for chat in played.chats:
        assert len(chat.prompt_ids) > 0
        assert len(chat.completion_ids) == len(chat.logprobs) > 0
    with pytest.raises(RolloutFailed, match="no network") as error:
        palestra.play_episode(RolloutSpec(environment=Echo), {"text": "broken"}, job(tmp_path / "broken"))
    assert error.value.termination == "environment_failed"


def test_an_evaluation_keeps_order_and_says_what_failed(tmp_path):
    tasks = [{"text": "a"}, {"text": "broken"}, {"text": "b"}, {"text": "a"}]
    found = palestra.evaluate(
        environment=Echo, tasks=tasks, config=job(tmp_path / "run"), concurrency=2, trajectories=True, quiet=True
    )
    assert [outcome.trajectory.episode.task.data["text"] for outcome in found.outcomes] == ["a", "broken", "b", "a"]
    assert [outcome.reward is None for outcome in found.outcomes] == [False, True, False, False]
    assert "no network" in found.outcomes[1].reason
    assert found.complete
    scored = [outcome for outcome in found.outcomes if outcome.reward is not None]
    assert found.rewards == [sum(outcome.trajectory.episode.step_rewards) for outcome in scored]
    assert found.mean == sum(found.rewards) / 3
    assert found.interval[0] <= found.mean <= found.interval[1]
    kept = palestra.read_episodes(tmp_path / "run", "validation")
    assert [episode.reward for episode in kept] == found.rewards
    assert kept[0].episode_id == found.outcomes[0].episode_id


@pytest.mark.slow
def test_an_evaluation_loads_no_trainer_and_refuses_a_folder_that_has_a_run(tmp_path, monkeypatch):
    palestra.train(environment=Echo, tasks=TASKS, config=job(tmp_path / "trained"), quiet=True)
    monkeypatch.setattr(FakeTrainer, "__init__", lambda *_: pytest.fail("a trainer was made"))
    with pytest.raises(ConfigError, match="run already"):
        palestra.evaluate(environment=Echo, tasks=TASKS, config=job(tmp_path / "trained"), quiet=True)
    (outcome,) = palestra.evaluate(environment=Echo, tasks=TASKS[:1], config=job(tmp_path / "new"), quiet=True).outcomes
    assert outcome.reason is None
    assert outcome.trajectory is None


async def test_it_works_where_an_event_loop_is_running(tmp_path):
    arguments = {"environment": Echo, "tasks": TASKS[:1], "quiet": True}
    found = await asyncio.to_thread(palestra.evaluate, config=job(tmp_path / "thread"), **arguments)
    assert found.outcomes[0].reward is not None
    inside = palestra.evaluate(config=job(tmp_path / "here"), trajectories=True, **arguments)
    assert inside.outcomes[0].trajectory.chats[0].completion_ids.tolist() != []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["iterator", "file", "dataset"])
def test_tasks_may_come_from_an_endless_iterator_a_file_or_a_data_set(tmp_path, form):
    class Dataset:  # what `datasets.Dataset` is to those that read it
        def __len__(self):
            return len(TASKS)

        def __iter__(self):
            return iter(TASKS)

    lines = tmp_path / "tasks.jsonl"
    lines.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    forms = {"iterator": ({"text": f"task {n}"} for n in itertools.count()), "file": str(lines), "dataset": Dataset()}
    palestra.train(environment=Echo, tasks=forms[form], config=job(tmp_path / "run"), quiet=True)
    played = {episode.task_id for episode in palestra.read_episodes(tmp_path / "run", "train")}
    assert len(played) == 4  # 2 steps of 2 groups


def test_one_answer_to_a_prompt_is_scored_by_a_function_alone(tmp_path):
    tasks = [{"prompt": "a"}, {"prompt": "bb"}]
    config = job(tmp_path / "run")
    found = palestra.evaluate(reward=lambda task, answer: len(task["prompt"]), tasks=tasks, config=config, quiet=True)
    assert found.rewards == [1.0, 2.0]


def test_an_environment_that_only_fails_ends_the_training_with_the_reason(tmp_path):
    with pytest.raises(RolloutFailed, match=r"20.*network"):
        palestra.train(RolloutSpec(environment=Echo), [{"text": "broken"}], job(tmp_path), quiet=True)


@pytest.mark.parametrize(
    ("arguments", "config", "said"),
    [
        ((None, TASKS), {}, "nothing says what is played"),
        ((RolloutSpec(environment=Echo), TASKS), {"environment": {"name": "gomoku"}}, "more than once"),
        ((RolloutSpec(environment=Echo),), {}, "no training tasks"),
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
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "environments.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    checked, train, _ = code.partition("palestra.train(")
    assert train
    assert "check_environment(Guess" in checked
    exec(compile(checked, "docs/how-to/environments.md", "exec"), {})
