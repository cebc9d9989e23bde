"""A stranger's package adds an agent, an algorithm, a command, an engine, an environment, a harness, a renderer, a
reward, a sandbox and a tracker.

No file of Palestra changes: they are found by real metadata of a package on the path.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

CODE = '''
import json
import re
import sys
from typing import ClassVar, Literal
from pydantic import Field
import numpy as np
from palestra import Agent, Algorithm, Environment, LossSpec, TokenAdvantages
from palestra.algorithms.losses import ImportanceSamplingLoss
from palestra.agents import text_message
from palestra.config import PooledEngineConfig
from palestra.engine.driver import EngineDriver, LoadedEngine, byte_policies
from palestra.envs import CatalogEntry
from palestra.renderers import ChatMLRenderer, Renderer, Reply
from palestra.sandbox import Finished
from palestra.terminal import say
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall
from palestra_harness import Harness


class ParrotConfig(PooledEngineConfig):
    has_model: ClassVar[bool] = False
    kind: Literal["parrot"] = Field("parrot", description="The kind.")


class ParrotDriver(EngineDriver[ParrotConfig]):
    section = ParrotConfig

    def load(self, job, table):
        from palestra.engine.fake import FakeEngine

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


CALL = """
import json, os, sys, urllib.request
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": sys.argv[2]}]}
headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/chat/completions", json.dumps(body).encode(), headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("said.txt", "w").write(said)
"""
CODER = Harness(
    name="coder",
    command=(sys.executable, "-c", CALL, "{base_url}", "{task}"),
    variables={"KEY": "{api_key}", "MODEL": "{model}"},
)


class Echoes:
    name = "echoes"

    def check(self, spec):
        pass

    async def open(self, spec):
        return self

    async def run(self, command, **settings):
        return Finished(code=0, output=" ".join(command).encode(), errors=b"")

    async def close(self):
        say("closed")


class Called(ChatMLRenderer):
    """Tools are called in the way of Python: `add(a=1)`."""

    incremental = False  # a reply is parsed when it is over
    stream = Renderer.stream

    def parse(self, completion_ids, prompt_ids, tools=(), call_ids="call"):
        text = self.vocabulary.decode([one for one in completion_ids.tolist() if one not in self.stop_ids])
        found = re.fullmatch(r"(\\w+)\\((\\w+)=(\\d+)\\)", text) if tools else None
        if found is None:
            return super().parse(completion_ids, prompt_ids, tools, call_ids)
        asked = FunctionCall(name=found[1], arguments=json.dumps({found[2]: int(found[3])}))
        call = ToolCall(id=f"{call_ids}_0", function=asked)
        return Reply(message=ChatMessage(role="assistant", content=(), tool_calls=(call,)), malformed=())


def renderer(tokenizer, pictures):
    return Called(tokenizer) if pictures is None and tokenizer.init_kwargs.get("own_calls") else None


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
    "harnesses": "coder = stranger:CODER",
    "renderers": "called = stranger:renderer",
    "rewards": "short = stranger:short",
    "sandboxes": "echoes = stranger:Echoes",
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


RENDERED = """
import numpy as np
from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import select_renderer
tokenizer = load_tokenizer("tiny-random")
print(type(select_renderer(tokenizer)).__name__)
tokenizer.init_kwargs["own_calls"] = True
renderer = select_renderer(tokenizer)
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ids = np.array(tokenizer.encode("add(a=12)", add_special_tokens=False), np.int32)
(call,) = renderer.parse(ids, lambda: ids, tools).message.tool_calls
print(type(renderer).__name__, call.function.name, call.function.arguments)
"""


def test_its_renderer_reads_the_calls_of_the_models_that_it_knows(site):
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", RENDERED],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["ChatMLRenderer", 'Called add {"a": 12}'], done.stderr


BOX = """
import asyncio
from palestra.sandbox import SandboxSpec, sandbox
async def main():
    async with sandbox(SandboxSpec(image="any"), "echoes") as box:
        print((await box.run(["a", "b"])).output)
asyncio.run(main())
"""


def test_its_sandbox_runs_commands(site):
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    command = [sys.executable, "-c", BOX]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    assert done.stdout == "b'a b'\nclosed\n"


SCORE = """
def score(task, result):
    said = (result.workspace / "said.txt").read_text()
    assert (said, result.answer, result.exit_code, dict(result.refused)) == ("lora", "lora", 0, {})
    assert "+lora" in result.diff
    assert (result.workspace / "given.txt").read_text() == task["prompt"]
    return 0.5
"""
HARNESS = (
    JOB.split("[environment]")[0]
    + """
[tasks]
train = "tasks.jsonl"
[harness]
name = "coder"
score = "score.py"
folder = "given"
[rollout]
group_size = 2
groups_per_step = 1
[evaluation]
every_steps = 0
"""
)


@pytest.fixture
def given(site) -> Path:
    """A folder with the files of a job that the harness plays."""
    (site.parent / "score.py").write_text(SCORE)
    (site.parent / "given").mkdir()
    (site.parent / "given" / "given.txt").write_text("say it")
    (site.parent / "tasks.jsonl").write_text('{"prompt": "say it"}\n' * 2)
    return site.parent


def mean_reward(folder: Path) -> float:
    (row,) = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return row["train/reward_mean"]


def test_its_harness_plays_a_job(site, given):
    (given / "job.toml").write_text(HARNESS)
    assert "coder" in palestra(site, "harness", "list").stdout
    palestra(site, "run", "job.toml")
    assert mean_reward(given) == 0.5


@pytest.mark.slow
def test_its_harness_plays_for_a_worker(site, given, monkeypatch):
    monkeypatch.setenv("PALESTRA_API_KEY", "key-of-the-test")
    before, after = HARNESS.split("[tasks]")
    job = (
        before.replace("port = 0", "port = 0\n[watchdog]\nstuck_seconds = 60")
        + "[rollout]"
        + after.split("[rollout]")[1]
    )
    (given / "job.toml").write_text(job)
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    variables = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-m", "palestra.cli.main", "run", "job.toml"]
    with subprocess.Popen(command, cwd=given, env=variables, stdout=subprocess.PIPE, text=True) as server:
        url = next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
        settings = json.dumps({"folder": "given"})
        words = ("--harness", "coder", "--score", "score.py", "--tasks", "tasks.jsonl", "--settings", settings)
        palestra(site, "worker", *words, "--url", url, "--concurrency", "2")
        server.stdout.read()
        assert server.wait() == 0
    assert mean_reward(given) == 0.5
