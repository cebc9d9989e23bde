from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import palestra
from palestra import JobConfig
from palestra.errors import ConfigError
from palestra.runtime import training
from palestra_worlds import Gomoku, KuhnPoker

pytestmark = pytest.mark.ci


def by_length(task, answer):
    return float(len(answer))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tasks": "train.jsonl"}, "tasks file train.jsonl: No such file"),
        ({"validation_tasks": Path("held.jsonl")}, "tasks file held.jsonl: No such file"),
        ({"tasks": {"a": 1}}, "`tasks` is one dict, not several tasks; write [{…}]"),
        ({"tasks": 3}, "`tasks` has the type int; give a list of JSON objects"),
        ({"config": {"steps": 3}}, "the configuration is a dict; write palestra.JobConfig(steps=30, …)"),
        ({"rollout": Gomoku}, "Gomoku is an environment, not a rollout function; give environment=Gomoku"),
        ({"rollout": Gomoku()}, "give environment=Gomoku"),
        ({"rollout": 3}, "`rollout` has the type int; give a function"),
        ({"rollout": lambda task: 1.0}, "can't be called as <lambda>(task, endpoint): too many positional arguments"),
        ({"rollout": lambda task, endpoint, *, key: 1.0}, "argument: 'key'"),
        (
            {"rollout": None, "reward": lambda answer: 1.0},
            "(answer) can't be called as <lambda>(task, answer): too many",
        ),
        ({"rollout": None}, "nothing says what is played"),
        ({"environment": Gomoku}, "said more than once, by rollout and environment;"),
        ({"environment": "gomoku"}, "said more than once, by rollout and environment.name = 'gomoku'"),
        (
            {"rollout": None, "environment": Gomoku()},
            "each episode needs its own; give the class Gomoku, or `lambda: Gomoku(…)`",
        ),
        ({"rollout": None, "reward": 3}, "`reward` has the type int; give a function"),
        ({"rollout": None, "reward": by_length}, "`tasks`, task 0: the task has no key `prompt`; it has 'a'"),
        (
            {
                "rollout": None,
                "reward": by_length,
                "tasks": [{"prompt": "?"}, {"prompt": {"role": "user", "content": "?"}}],
            },
            "`tasks`, task 1: the task's `prompt` has the type dict; give a text, or a list of messages",
        ),
        (
            {"rollout": None, "reward": by_length, "tasks": [{"prompt": "?"}], "validation_tasks": [{}]},
            "`validation_tasks`, task 0: the task has no key `prompt`",
        ),
        ({"model": 3}, "`model` has the type int; give the name of a model"),
        ({"model": ""}, "PolicyConfig: model: String should have at least 1 character"),
        (
            {"rollout": None, "environment": "gomoku", "config": JobConfig(environment={"name": "calculator"})},
            "`environment` is 'gomoku', and environment.name is 'calculator'; leave one out",
        ),
    ],
)
def test_an_argument_of_another_kind_is_refused_before_anything_is_loaded(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        palestra.train(**({"rollout": lambda task, policy: 1.0, "tasks": [{"a": 1}]} | arguments))
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


class _Started(Exception):
    pass


@pytest.mark.parametrize(
    ("settings", "port"),
    [
        ({"server": {"port": 8433}, "seats": {"roles": ["first"]}}, 8433),
        ({"seats": {"roles": ["first"]}}, 0),
        ({"server": {"port": 8433}}, 0),
    ],
)
def test_a_job_with_seats_listens_where_their_workers_are_told_to_call(settings, port, tmp_path, monkeypatch):
    started: list[JobConfig] = []

    def start(config: JobConfig, *_: object, **__: object) -> None:
        started.append(config)
        raise _Started

    monkeypatch.setattr(training, "JobThread", start)
    with pytest.raises(_Started):
        palestra.train(config=JobConfig(run_dir=tmp_path, **settings), environment="kuhn-poker", quiet=True)
    assert started[0].server.port == port


def test_tasks_that_are_given_beside_a_file_of_tasks_are_refused(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match=r"`train`.*tasks\.train"):
        palestra.train(
            lambda task, policy: 1.0, [{"a": 2}], JobConfig(tasks={"train": file}, run_dir=tmp_path / "run"), quiet=True
        )


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (
            {"first": "one", "secnod": "two"},
            r"roles.secnod.*'secnod'.*'first'.*'second'",
        ),
        (
            {"first": "two", "second": "two"},
            r"policies.one.*'one'",
        ),
    ],
)
@pytest.mark.parametrize("environment", [KuhnPoker, lambda: KuhnPoker(), "kuhn-poker"])
def test_a_role_that_the_environment_lacks_and_a_policy_that_plays_nothing_are_refused(
    environment, roles, said, tmp_path
):
    config = JobConfig(
        engine={"kind": "fake"}, policies={"one": {}, "two": {}}, roles=roles, run_dir=tmp_path / "run", steps=1
    )
    tasks = [] if environment == "kuhn-poker" else [{"cards": [1, 2]}]
    with pytest.raises(ConfigError, match=said):
        palestra.train(environment=environment, tasks=tasks, config=config, quiet=True)
    assert not (tmp_path / "run").exists()


class DyingJob:
    """A job whose server is gone before it takes a request."""

    def __init__(self, port: int) -> None:
        self.url, self.api_key, self.ended = f"http://127.0.0.1:{port}", "key", asyncio.Event()

    async def start(self) -> DyingJob:
        asyncio.get_running_loop().call_later(0.2, self.ended.set)
        return self

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("rollout", [None, lambda task, endpoint: 1.0])
async def test_a_job_that_ends_before_it_has_its_tasks_is_not_waited_for(unused_tcp_port, rollout):
    async with asyncio.timeout(10):
        await training.play_until_over(DyingJob(unused_tcp_port), rollout, 1)
