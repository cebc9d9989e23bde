"""`palestra eval`: what it prints, its exit codes, and what it leaves."""

from __future__ import annotations

import json

import pytest
from test_command_line import palestra, refused
from unit.inspect.test_environments import NIM

from palestra import JobConfig, evaluate, train
from palestra.store.browsing import browse, list_episodes, read_episode

ROLLOUT = """
import openai

def rollout(task, policy):
    ai = openai.OpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0)
    reply = ai.chat.completions.create(
        model=policy.model, messages=[{"role": "user", "content": task["text"]}], temperature=1.0
    )
    if task["text"] == "broken":
        raise KeyError("answer")
    return float(len(reply.choices[0].message.content) % 2)
"""
SCRIPTED = ["--set", "engine.kind=fake"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(ROLLOUT)
    return tmp_path


def tasks(folder, *texts: str) -> str:
    rows = [json.dumps({"id": f"task-{n}", "text": text}) + "\n" for n, text in enumerate(texts)]
    (folder / "tasks.jsonl").write_text("".join(rows))
    return "tasks.jsonl"


@pytest.mark.parametrize("number", ["0", "-1"])
def test_that_nothing_is_played_at_the_same_time_is_refused(folder, number):
    names = tasks(folder, "question")
    options = ("--rollout", "agent.py:rollout", f"--concurrency={number}", *SCRIPTED)
    refused(palestra("eval", "tiny-random", names, *options), "--concurrency")


@pytest.mark.slow
def test_every_task_is_scored_once_and_greedily(folder):
    names = tasks(folder, *[f"question {n}" for n in range(7)])
    kept = folder / "kept"
    done = palestra("eval", "tiny-random", names, "--rollout", "agent.py:rollout", "--run-dir", kept, *SCRIPTED)
    lines = [line.split("  ") for line in done.stdout.splitlines() if line.startswith("task-")]
    assert (done.code, [name for name, _ in lines]) == (0, [f"task-{n}" for n in range(7)])
    mean = sum(float(reward) for _, reward in lines) / 7
    assert f"mean reward {mean:.3f} (95 % interval " in done.stdout
    listed = palestra("episodes", kept)
    assert listed.stdout.count("completed") == 7
    again = palestra("eval", "tiny-random", names, "--rollout", "agent.py:rollout", *SCRIPTED)
    assert [line for line in again.stdout.splitlines() if "task-" in line] == ["  ".join(line) for line in lines]
    refused(palestra("eval", "tiny-random", names, "--rollout", "agent.py:rollout", "--run-dir", kept), "kept")


def test_what_fails_is_named_is_no_zero_and_makes_the_exit_code_1(folder):
    names = tasks(folder, "a", "broken", "c")
    done = palestra("eval", "tiny-random", names, "--rollout", "agent.py:rollout", *SCRIPTED)
    assert done.code == 1
    assert "task-1  not scored: KeyError: 'answer'" in done.stdout
    assert "on 2 tasks; 1 of 3 were not scored" in done.stdout


def test_an_environment_may_make_its_own_tasks(folder):
    done = palestra("eval", "tiny-random", "--environment", "arithmetic", "--quiet", *SCRIPTED)
    assert done.code == 0
    assert done.stdout.count("\n") == 1
    assert "on 64 tasks" in done.stdout


def test_what_is_missing_is_said(folder):
    refused(palestra("eval", "tiny-random", "none.jsonl", "--rollout", "agent.py:rollout"), "none.jsonl")
    refused(palestra("eval", "tiny-random", "--rollout", "agent.py:rollout"), "TASKS")
    refused(palestra("eval", "tiny-random", tasks(folder), "--rollout", "agent.py:rollout"), "nothing to score")
    refused(palestra("eval", "./nowhere", tasks(folder, "a"), "--rollout", "agent.py:rollout"), "./nowhere")


@pytest.mark.slow
def test_an_environment_of_ones_own_is_scored_and_played_in_a_matrix(folder):
    (folder / "nim.py").write_text(NIM)
    (folder / "games.jsonl").write_text('{"id": "a", "pile": 3}\n{"id": "b", "pile": 4}\n')
    small = ("--set", "model=tiny-random", "--set", "policies.policy.max_context=64", "--set", "engine.threads=1")
    own = ("--environment", "nim.py:Nim")
    done = palestra("eval", "tiny-random", "games.jsonl", *own, "--random", "bob", *small[2:])
    assert (done.code, done.stdout.count("mean reward")) == (0, 1), done.stderr
    players = ("--add", "one=tiny-random", "--add", "other=tiny-random")
    done = palestra("matrix", *players, *own, "--tasks", "games.jsonl", "--games=2", *small)
    assert (done.code, "in 4 games" in done.stdout) == (0, True), done.stderr
    refused(palestra("eval", "tiny-random", *own, *small[2:]), "name a file of tasks")
    refused(palestra("matrix", *players, *own, *small), "there is nothing to play: give `tasks`")
    refused(palestra("matrix", *players, *small), "--environment NAME, or module:Class")
    refused(palestra("eval", "tiny-random", "games.jsonl", "--environment", "nim.py:Nam"), "nim.py has no 'Nam'")


@pytest.mark.slow
def test_a_run_is_scored_with_its_own_prompt_and_limits(folder):
    (folder / "scoring.py").write_text("def reward(task, answer):\n    return float(len(answer) % 2)\n")
    (folder / "asked.jsonl").write_text('{"id": "a", "prompt": "1 + 1 ="}\n')
    config = JobConfig.model_validate(
        {
            "model": "tiny-random",
            "steps": 1,
            "run_dir": folder / "run",
            "environment": {"system": "You are a calculator."},
            "policies": {"policy": {"sampling": {"max_tokens": 5}}},
            "rollout": {"group_size": 2, "groups_per_step": 1},
            "tasks": {"validation": folder / "asked.jsonl", "train": folder / "asked.jsonl"},
        }
    )
    train(reward=lambda task, answer: float(len(answer) % 2), config=config, quiet=True)
    done = palestra("eval", "run", "--reward", "scoring.py:reward", "--run-dir", "kept")
    assert done.code == 0, done.stderr
    assert "environment.system = 'You are a calculator.'" in done.stderr
    with browse(folder / "kept" / "run.db") as connection:
        (episode,) = list_episodes(connection, "validation", None, 9)
        (call,) = read_episode(connection, episode.episode_id).trajectory.chats
    assert call.messages[0].text == "You are a calculator."
    assert len(call.completion_ids) <= 5
    found = evaluate(reward=lambda task, answer: 1.0, model="run", trajectories=True, quiet=True)
    assert found.outcomes[0].trajectory.chats[0].completion_ids.tolist() == call.completion_ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["eval", "tiny-random", "tasks.jsonl"], ["check", "job.toml"]], ids=["eval", "check"]
)
def test_an_error_of_the_users_function_is_one_line_with_its_place(folder, command):
    tasks(folder, *["broken"] * 8)
    (folder / "job.toml").write_text('model = "tiny-random"\ntasks.train = "tasks.jsonl"')
    done = palestra(*command, "--rollout", "agent.py:rollout", *SCRIPTED)
    assert done.code == 2
    assert done.stderr.splitlines()[-1].startswith("palestra: KeyError: 'answer' (agent.py:10, in rollout); ")
    assert "Traceback" not in done.stderr
    if command[0] == "eval":
        with pytest.raises(KeyError, match="answer"):  # which Python prints with its traceback
            palestra("--verbose", *command, "--rollout", "agent.py:rollout", *SCRIPTED)


@pytest.mark.slow
def test_a_model_that_is_of_no_run_is_scored_with_defaults_and_says_so(folder):
    names = tasks(folder, "question")
    done = palestra("eval", "tiny-random", names, "--rollout", "agent.py:rollout", *SCRIPTED)
    assert "settings were the defaults and --set; --config RUN/config.toml takes those of a run" in done.stderr


@pytest.mark.slow
def test_an_environment_of_gymnasium_is_scored_by_its_name(folder):
    (folder / "tasks.jsonl").write_text('{"id": "task-0", "seed": 1}\n')
    done = palestra("eval", "tiny-random", "tasks.jsonl", "--environment", "FrozenLake-v1", *SCRIPTED)
    assert (done.code, done.stdout.count("task-0  ")) == (0, 1)
