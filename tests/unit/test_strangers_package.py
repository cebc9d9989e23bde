"""A stranger's package adds an agent, an algorithm, a command, an engine, an environment, a reward and a tracker.

No file of Palestra changes: they are found by real metadata of a package on the path.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

CODE = '''
from typing import ClassVar, Literal
from pydantic import Field
import numpy as np
from palestra import Agent, Algorithm, Environment, LossSpec, TokenAdvantages
from palestra.algorithms.losses import ImportanceSamplingLoss
from palestra.agents import text_message
from palestra.config import PooledEngineConfig
from palestra.engine.driver import EngineDriver, LoadedEngine, byte_policies
from palestra.envs import CatalogEntry
from palestra.terminal import say


class ParrotConfig(PooledEngineConfig):
    has_model: ClassVar[bool] = False
    kind: Literal["parrot"] = Field("parrot", description="The kind.")


class ParrotDriver(EngineDriver[ParrotConfig]):
    section = ParrotConfig

    def load(self, job, table):
        from palestra.engine.fake.driver import FakeEngine

        return LoadedEngine(FakeEngine(lambda prompt, sampling: [*b"lora", 258]), byte_policies(job.config))


class Echo(Environment):
    def reset(self, task):
        return task["word"], {}

    def step(self, action):
        return "", float(action == "lora"), True, False, {}


ECHO = CatalogEntry(
    summary="say the word", make=Echo,
    generate=lambda split, count, seed: [{"id": f"{split}-{n}", "word": "lora"} for n in range(count)],
)


class Twice(Agent):
    def __init__(self, hint: str) -> None:
        self.hint = hint

    async def step(self, observation, policy):
        first = await policy.chat((*policy.history, *observation.content))
        chat = await policy.chat((*policy.history, text_message("user", self.hint)))
        return [first, chat], chat.reply


class Halved(Algorithm):
    """Half of the reward."""

    def advantages(self, groups, forward):
        rewards = {t.episode.episode_id: t.episode.reward for group in groups for t in group.trajectories}
        rows = [row for group in groups for row in group.rows]
        each = [np.full(len(row.ids), rewards[row.episode_id] / 2, np.float32) for row in rows]
        return TokenAdvantages(advantages=each, metrics={})

    def loss(self):
        return LossSpec.of(ImportanceSamplingLoss())


class Lines:
    def __init__(self, run):
        self.file = run.folder / "lines.txt"

    def begin(self):
        self.file.write_text("")

    def write(self, step, values, at):
        with self.file.open("a") as file:
            print(step, sorted(values), file=file)

    def flush(self):
        pass

    def close(self, completed):
        pass


def short(task, answer):
    return float(len(answer) < 5)


def add_greet(commands):
    parser = commands.add_parser("greet", help="say hello")
    parser.set_defaults(run=lambda arguments: say("hello"))
'''
ENTRIES = {
    "agents": "twice = stranger:Twice",
    "algorithms": "halved = stranger:Halved",
    "commands": "greet = stranger:add_greet",
    "engines": "parrot = stranger:ParrotDriver",
    "environments": "echo = stranger:ECHO",
    "rewards": "short = stranger:short",
    "trackers": "lines = stranger:Lines",
}
JOB = """
name = "strange"
run_dir = "run"
steps = 1
tracking = ["lines"]
[server]
port = 0
[engine]
kind = "parrot"
[environment]
name = "echo"
train_tasks = 4
validation_tasks = 0
[rollout]
group_size = 2
groups_per_step = 1
[algorithm]
name = "halved"
[evaluation]
every_steps = 0
"""


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder with the package, as pip leaves it."""
    info = tmp_path / "site" / "stranger-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "stranger.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[palestra.{group}]\n{line}\n" for group, line in ENTRIES.items()))
    return tmp_path / "site"


def palestra(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "palestra.cli.main", *words],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_its_command_and_its_environment_are_listed(site):
    assert palestra(site, "greet").stdout == "hello\n"
    assert "echo" in palestra(site, "environments").stdout


def test_a_command_that_can_not_be_loaded_is_named_and_the_others_work(site):
    entries = site / "stranger-1.0.dist-info" / "entry_points.txt"
    named = "broken = stranger_that_is_not_there\ngreet = stranger:add_greet\nmodule = stranger\n"
    entries.write_text(f"[palestra.commands]\n{named}")
    done = palestra(site, "greet")
    assert done.stdout == "hello\n"
    assert "there is no command 'broken': 'broken' of palestra.commands can't be loaded" in done.stderr
    assert "there is no command 'module': stranger is no function" in done.stderr


def test_its_engine_environment_algorithm_and_tracker_make_a_job(site):
    (site.parent / "job.toml").write_text(JOB)
    palestra(site, "run", "job.toml")
    (row,) = map(json.loads, (site.parent / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["train/reward_mean"] == 1.0
    (lines,) = site.parent.rglob("lines.txt")
    assert "train/reward_mean" in lines.read_text()


@pytest.mark.parametrize("runners", ["", "runners = 1"])
def test_its_agent_acts_in_the_job_and_in_its_runners(site, runners):
    agent = f'agent = "twice"\nagent_settings = {{hint = "again"}}\n{runners}\ntrain_tasks'
    (site.parent / "job.toml").write_text(JOB.replace("train_tasks", agent))
    palestra(site, "run", "job.toml")
    with closing(sqlite3.connect(site.parent / "run" / "run.db")) as store:
        calls = store.execute("SELECT count(*), sum(messages LIKE '%again%') FROM chats GROUP BY episode_id").fetchall()
    assert calls == [(2, 1)] * 2


def test_its_reward_scores_answers(site):
    (site.parent / "tasks.jsonl").write_text('{"prompt": "say it"}\n' * 2)
    (site.parent / "job.toml").write_text(
        'run_dir = "run"\nsteps = 1\n[server]\nport = 0\n[engine]\nkind = "parrot"\n'
        "[rollout]\ngroup_size = 2\ngroups_per_step = 1\n[evaluation]\nevery_steps = 0\n"
    )
    palestra(site, "train", "--reward", "short", "--tasks", "tasks.jsonl", "--config", "job.toml")
    (row,) = map(json.loads, (site.parent / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["train/reward_mean"] == 1.0  # "lora" has fewer than 5 characters
