"""Jobs whose rewards are given by a judge behind real HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from judge_server import Asked, judging

import palestra
from palestra import JobConfig
from palestra.cli.main import main
from palestra.config import JudgeAccess, JudgeConfig
from palestra.envs.judge import Judge, JudgedGroup, VerdictBook
from palestra.errors import ConfigError, EpisodesLost, JudgeUnavailable
from palestra.runtime.local import local_job
from palestra.store.lifecycle import EpisodeEnd
from palestra.threads import own_loop
from palestra.types.records import EpisodeRecord, Task
from palestra_judges import Criterion, Relative, Rubric
from palestra_judges import model as judge_model
from palestra_judges.relative import RelativeJudge

pytestmark = pytest.mark.ci

TASKS = [{"id": f"t{n}", "prompt": f"say {n}"} for n in range(3)]


def config(folder: Path, **changes: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "run_dir": str(folder),
            "steps": 2,
            "deterministic": True,
            "rollout": {"group_size": 4, "groups_per_step": 2},
            "engine": {"kind": "fake", "reply_tokens": 6},
            "evaluation": {"every_steps": 0},
        }
        | changes
    )


def rows(folder: Path, query: str) -> list[dict[str, Any]]:
    connection = sqlite3.connect(folder / "run.db")
    connection.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in connection.execute(query)]
    finally:
        connection.close()


def weights(folder: Path) -> dict[str, bytes]:
    newest = max((folder / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in newest.iterdir() if path.suffix != ".json"}


CRITERIA = [
    Criterion(name="long", text="Is it long?", choices=["no", "somewhat", "yes"], weight=2.0),
    Criterion(name="odd", text="Is it odd?", weight=0.0),
]


def long_and_odd(asked: Asked) -> str:
    digits = sum(character.isdigit() for character in asked.text)
    chosen = {"long": ["no", "somewhat", "yes"][min(digits // 2, 2)], "odd": ["no", "yes"][digits % 2]}
    return asked.choose(lambda one: chosen[one["name"]], reason=f"{digits} digits")


def test_each_criterion_is_a_named_reward_and_the_verdict_is_kept_with_its_reason(tmp_path):
    with judging(long_and_odd) as server:
        rubric = Rubric(url=server.url, criteria=CRITERIA)
        done = palestra.train(reward=rubric, tasks=TASKS, config=config(tmp_path / "run"), quiet=True)
    assert done.state == "completed"
    episodes = rows(tmp_path / "run", "SELECT * FROM episodes WHERE kind = 'train'")
    assert len(episodes) == 16
    assert {row["state"] for row in episodes} == {"completed"}
    verdicts = {json.loads(row["members"])[0][0]: row for row in rows(tmp_path / "run", "SELECT * FROM verdicts")}
    for row in episodes:
        named = json.loads(row["named_rewards"])
        assert named.keys() == {"long", "odd"}
        assert json.loads(row["rewards"]) == {"agent": 2 * named["long"]}
        assert json.loads(verdicts[row["episode_id"]]["scores"])[row["episode_id"]] == named
        assert json.loads(verdicts[row["episode_id"]]["reasons"])[row["episode_id"]]["long"].endswith("digits")
    assert len(server.asked) == 16
    assert done.metrics[-1]["judge/verdicts"] == 8
    assert done.metrics[-1]["judge/tokens"] == 800


def breaks(text: str) -> bool:
    """Whether the judge fails on a reply: on about a fifth of them."""
    return hashlib.sha256(text.encode()).digest()[0] < 51


@pytest.mark.usefixtures("asked_once")
def test_a_judge_that_fails_leaves_the_weights_of_a_run_without_those_episodes(tmp_path):
    def judge(asked: Asked) -> Any:
        return (400, b"too long") if breaks(asked.text) else long_and_odd(asked)

    def reward(task: dict[str, Any], answer: str) -> dict[str, float] | None:
        digits = sum(character.isdigit() for character in answer)
        return None if breaks(answer) else {"long": min(digits // 2, 2) / 2, "odd": float(digits % 2)}

    with judging(judge) as server:
        rubric = Rubric(url=server.url, criteria=CRITERIA)
        palestra.train(reward=rubric, tasks=TASKS, config=config(tmp_path / "judged"), quiet=True)
    weighed = config(tmp_path / "plain", algorithm={"name": "grpo", "reward_weights": {"long": 2.0, "odd": 0.0}})
    palestra.train(reward=reward, tasks=TASKS, config=weighed, quiet=True)
    lost = rows(tmp_path / "judged", "SELECT reason FROM episodes WHERE state = 'discarded'")
    assert len(lost) >= 2
    assert all(row["reason"].startswith("judge_failed: the judge's server refused the question (400)") for row in lost)
    query = "SELECT step, episode_ids FROM manifests"
    assert rows(tmp_path / "judged", query) == rows(tmp_path / "plain", query)
    assert weights(tmp_path / "judged") == weights(tmp_path / "plain")


async def test_what_the_environment_gave_to_an_unjudged_episode_is_no_reward(tmp_path):
    """In validation, in an evaluation, and in the store."""

    def judge(asked: Asked) -> Any:
        return (400, b"too long") if asked.data["question"] == "say 0" else asked.choose(lambda one: "yes")

    with judging(judge) as server:
        rubric = Rubric(url=server.url, criteria=[Criterion(name="good", text="?")])
        settings = config(tmp_path / "run", evaluation={"every_steps": 1}, steps=1)
        settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"groups_per_step": 1})})
        done = await asyncio.to_thread(
            palestra.train, reward=rubric, tasks=TASKS[1:], validation_tasks=TASKS, config=settings, quiet=True
        )
        scored = await asyncio.to_thread(
            palestra.evaluate, config=config(tmp_path / "scored"), reward=rubric, tasks=TASKS, quiet=True
        )
    assert done.metrics[0]["validation/scored"] == 2
    assert done.metrics[0]["validation/reward_mean"] == 1.0
    assert [one.reward for one in scored.outcomes] == [None, 1.0, 1.0]
    columns = "rewards, named_rewards, step_rewards, agent_step_rewards"
    (lost,) = rows(tmp_path / "scored", f"SELECT {columns} FROM episodes WHERE state = 'discarded'")
    assert set(lost.values()) == {None}


def test_a_judge_that_is_away_ends_the_job_which_goes_on_without_a_loss(tmp_path, monkeypatch):
    away = True
    monkeypatch.setattr(judge_model, "OUTAGE_SECONDS", 0.3)
    with judging(lambda asked: (503, b"busy") if away else long_and_odd(asked)) as server:
        rubric, settings = Rubric(url=server.url, criteria=CRITERIA), config(tmp_path / "run", steps=1)
        with pytest.raises(JudgeUnavailable, match=r"503.*'busy'.*0.3"):
            palestra.train(reward=rubric, tasks=TASKS, config=settings, quiet=True)
        assert {row["state"] for row in rows(tmp_path / "run", "SELECT state FROM episodes")} == {"unjudged"}
        away = False
        palestra.train(reward=rubric, tasks=TASKS, config=settings, resume=True, quiet=True)
    assert {row["state"] for row in rows(tmp_path / "run", "SELECT state FROM episodes")} == {"completed"}


SCRIPT = """
import sys, palestra
from test_jobs import CRITERIA, TASKS, config
from palestra_judges import Rubric
folder, url, resume = sys.argv[1:]
rubric = Rubric(url=url, criteria=CRITERIA, max_concurrency=1)
palestra.train(reward=rubric, tasks=TASKS, config=config(folder), resume=resume == "resume", quiet=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["after_verdict_commit:3", "before_step:2"])
def test_a_job_that_was_killed_asks_for_no_stored_verdict_again(tmp_path, fault):
    def run(folder: Path, url: str, resume: str, fault: str = "") -> int:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
        made = os.environ | {"PYTHONPATH": path, "PALESTRA_FAULT": fault}
        return subprocess.run([sys.executable, "-c", SCRIPT, folder, url, resume], env=made, timeout=170).returncode

    with judging(long_and_odd) as server:
        assert run(tmp_path / "killed", server.url, "new", fault) == -signal.SIGKILL
        stored = rows(tmp_path / "killed", "SELECT * FROM verdicts")
        before = len(server.asked)
        assert run(tmp_path / "killed", server.url, "resume") == 0
        assert len(server.asked) - before == 16 - len(stored)
        rubric = Rubric(url=server.url, criteria=CRITERIA, max_concurrency=1)
        palestra.train(reward=rubric, tasks=TASKS, config=config(tmp_path / "whole"), quiet=True)
    query = "SELECT kind, group_index, members, scores FROM verdicts ORDER BY 1, 2, 3"
    found = rows(tmp_path / "killed", query)
    assert len(found) == 16
    assert [row["scores"] for row in found] == [row["scores"] for row in rows(tmp_path / "whole", query)]
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_a_group_is_ranked_beside_the_reward_of_its_environment(tmp_path):
    def judge(asked: Asked) -> str:
        return asked.rank(lambda text: sum(character.isdigit() for character in text), bias=3.0)

    with judging(judge) as server:
        settings = config(tmp_path / "run", judge={"kind": "relative", "url": server.url})
        palestra.train(reward=lambda task, answer: len(answer) / 10, tasks=TASKS, config=settings, quiet=True)
    for row in rows(tmp_path / "run", "SELECT * FROM episodes"):
        named = json.loads(row["named_rewards"])
        assert named.keys() == {"environment", "rank", "rank_agreement"}
        assert json.loads(row["rewards"])["agent"] == pytest.approx(named["environment"] + named["rank"])
    assert {row["ordering"] for row in rows(tmp_path / "run", "SELECT ordering FROM verdicts")} == {0, 1}


def test_a_reply_is_validated_against_the_first_one_to_its_task(tmp_path):
    with judging(lambda asked: asked.rank(len)) as server:
        judge = Relative(url=server.url)
        settings = config(tmp_path / "run", evaluation={"every_steps": 1})
        done = palestra.train(reward=judge, tasks=TASKS, validation_tasks=TASKS[:2], config=settings, quiet=True)
    assert done.metrics[0]["validation/rewards/rank"] == 0.5  # of version 0 with itself
    validated = rows(tmp_path / "run", "SELECT * FROM verdicts WHERE kind = 'validation' AND group_index >= 2")
    assert {len(json.loads(row["members"])) for row in validated} == {2}
    assert {json.loads(row["members"])[0][0] for row in validated} == {"validation-000000-00", "validation-000001-00"}


@pytest.mark.usefixtures("asked_once")
def test_a_frozen_policy_of_the_job_judges(tmp_path):
    policies = {"policy": {}, "judge": {"frozen": True}}
    rubric = Rubric(policy="judge", criteria=CRITERIA)
    with pytest.raises(EpisodesLost, match=r"judge_failed.*JSON"):  # it says digits
        palestra.train(reward=rubric, tasks=TASKS, config=config(tmp_path / "run", policies=policies), quiet=True)
    assert {row["policy"] for row in rows(tmp_path / "run", "SELECT policy FROM chats")} == {"policy"}


def test_an_episode_is_shown_with_its_verdict_and_the_reason(tmp_path, capsys):
    with judging(long_and_odd) as server:
        rubric = Rubric(url=server.url, criteria=CRITERIA)
        palestra.train(reward=rubric, tasks=TASKS, config=config(tmp_path / "run", steps=1), quiet=True)
    for how in ([], ["--text"]):
        assert main(["episodes", str(tmp_path / "run"), "train-000000-00", *how]) == 0
        said = capsys.readouterr().out
        assert re.search(r"verdict 0: long (0|0.5|1), because: \d digits", said)
    assert main(["episodes", str(tmp_path / "run"), "train-000000-00", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["verdicts"]
    assert [one["name"] for one in shown] == ["long", "odd"]


async def test_who_does_not_come_in_time_is_discarded_and_the_others_are_judged(tmp_path):
    rollout = {"group_size": 3, "groups_per_step": 1}
    with judging(lambda asked: asked.rank(len)) as server:
        judge = {"kind": "relative", "url": server.url, "wait_seconds": 0.2}
        settings = config(tmp_path / "run", rollout=rollout, steps=1, judge=judge, server={"port": 0})
        async with local_job(settings, lambda kind, data: None) as job:
            running = asyncio.create_task(job.run())
            store = job.plane.store
            await store.tasks.push("train", [Task(task_id="t", data={"prompt": "say"})], "chunk")
            await store.tasks.seal()
            claimed: list[EpisodeRecord] = []
            while len(claimed) < 3:
                await asyncio.sleep(0.01)
                if (one := await store.episodes.claim("w", f"r{len(claimed)}", None)) is not None:
                    claimed.append(one)
            for one in claimed[:2]:
                await store.episodes.end(one.episode_id, one.fence, EpisodeEnd(rewards={"agent": 1.0}))
            await running
    found = rows(tmp_path / "run", "SELECT state, reason FROM episodes ORDER BY sample_index")
    assert [row["state"] for row in found] == ["completed", "completed", "discarded"]
    assert found[2]["reason"].startswith("judge_failed: not played 0.2 s after the first")


@pytest.mark.slow
async def test_the_time_in_which_no_server_ran_is_no_time_to_wait_for_who_plays(tmp_path):
    rollout = {"group_size": 3, "groups_per_step": 1}
    with judging(lambda asked: asked.rank(len)) as server:

        def settings(wait: float) -> JobConfig:
            judge = {"kind": "relative", "url": server.url, "wait_seconds": wait}
            return config(tmp_path / "run", rollout=rollout, steps=1, judge=judge, server={"port": 0})

        claimed: list[EpisodeRecord] = []
        async with local_job(settings(60.0), lambda kind, data: None) as job:
            running = asyncio.create_task(job.run())
            store = job.plane.store
            await store.tasks.push("train", [Task(task_id="t", data={"prompt": "say"})], "chunk")
            await store.tasks.seal()
            while len(claimed) < 3:
                await asyncio.sleep(0.01)
                if (one := await store.episodes.claim("w", f"r{len(claimed)}", None)) is not None:
                    claimed.append(one)
            for one in claimed[:2]:
                await store.episodes.end(one.episode_id, one.fence, EpisodeEnd(rewards={"agent": 1.0}))
            running.cancel()
            await asyncio.wait((running,))
        await asyncio.sleep(1.0)
        async with local_job(settings(1.0), lambda kind, data: None) as job:
            running = asyncio.create_task(job.run())
            await asyncio.sleep(0.4)
            states = [
                row["state"] for row in rows(tmp_path / "run", "SELECT state FROM episodes ORDER BY sample_index")
            ]
            running.cancel()
            await asyncio.wait((running,))
    assert states[:2] == ["unjudged"] * 2
    assert states[2] != "discarded"


def test_a_job_that_ends_while_it_judges_leaves_no_task_behind():
    ended = []

    async def asks() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)  # as a connection takes to be closed
            ended.append(True)

    with own_loop("test") as loop:
        asyncio.run_coroutine_threadsafe(asks(), loop)
        time.sleep(0.05)
    assert ended == [True]


class Longest(JudgeConfig):
    """A judge that no entry point names."""

    kind: Literal["longest"] = "longest"

    @property
    def reward_weights(self) -> dict[str, float]:
        return {}

    def make(self, access: JudgeAccess) -> Judge:
        raise NotImplementedError


def test_a_judge_without_a_method_is_refused_when_its_table_is_read():
    class Nothing(JudgeConfig):
        kind: Literal["nothing"] = "nothing"

    with pytest.raises(TypeError, match="abstract"):
        Nothing()


def test_a_judge_that_no_package_names_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"palestra\.judges"):
        palestra.train(reward=Longest(), tasks=TASKS, config=config(tmp_path / "run"), quiet=True)


def test_what_a_judge_leaves_out_is_discarded_and_so_is_what_it_breaks_on(tmp_path, monkeypatch, capsys):
    async def opened(self: RelativeJudge) -> list[str]:
        return ["a doubtful judge"]

    async def judge(self: RelativeJudge, group: JudgedGroup, book: VerdictBook) -> dict[str, dict[str, float]]:
        if group.group_index == 1:
            raise ZeroDivisionError("a bug of the judge")
        return {name: {"rank": 1.0} for name in sorted(group.waiting)[1:]}

    monkeypatch.setattr(RelativeJudge, "open", opened)
    monkeypatch.setattr(RelativeJudge, "judge", judge)
    palestra.train(reward=Relative(url="http://127.0.0.1:9"), tasks=TASKS, config=config(tmp_path / "run", steps=1))
    assert "a doubtful judge" in capsys.readouterr().out
    found = rows(tmp_path / "run", "SELECT * FROM episodes ORDER BY group_index, sample_index")
    reasons = [row["reason"] for row in found]
    assert reasons[:4] == ["judge_failed: the judge left it out", None, None, None]
    assert all(reason.startswith("judge_failed: ZeroDivisionError: a bug") for reason in reasons[4:8])
    assert [row["state"] for row in found[:4]] == ["discarded", *["completed"] * 3]
