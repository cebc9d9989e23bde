"""Jobs with an audit: its judge is behind real HTTP, its scores are no rewards, and it may hold versions back."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from judge_server import Asked, judging

import palestra
from palestra import JobConfig
from palestra.cli.main import main
from palestra.config import parse_config
from palestra.doctor import evidence
from palestra.doctor.examination import examine
from palestra.errors import ConfigError, VersionQuarantined
from palestra.runtime.local import local_job
from palestra.trainer.quarantine import Quarantine, read_quarantine, write_quarantine
from palestra.types.records import Task
from palestra_judges import Criterion, Rubric
from unit.judges.test_jobs import TASKS, rows, weights
from unit.judges.test_jobs import config as judged

pytestmark = pytest.mark.ci


def digits(text: str) -> int:
    return sum(map(str.isdigit, text))


def odd(task: dict[str, Any], answer: str) -> float:
    return float(digits(answer) % 2)


def even(asked: Asked) -> str:
    """An auditor that scores what is not paid."""
    return asked.choose(lambda one: ["no", "yes"][1 - digits(asked.text) % 2])


def odd_too(asked: Asked) -> str:
    return asked.choose(lambda one: ["no", "yes"][digits(asked.text) % 2])


def audit(url: str, **changes: Any) -> dict[str, Any]:
    criteria = [{"name": "good", "text": "Is it good?"}]
    return {"judge": {"kind": "rubric", "url": url, "criteria": criteria}, **changes}


def config(folder: Path, url: str, steps: int = 2, **changes: Any) -> JobConfig:
    rollout = {"group_size": 4, "groups_per_step": 4}
    return judged(folder, steps=steps, rollout=rollout, audit=audit(url, **changes))


def test_scores_are_kept_beside_the_rewards_and_change_no_weight(tmp_path, capsys):
    with judging(even) as server:
        settings = config(tmp_path / "run", server.url, steps=1, episodes=12)
        done = palestra.train(reward=odd, tasks=TASKS, config=settings, quiet=True)
    plain = settings.model_copy(update={"audit": None, "run_dir": tmp_path / "plain"})
    palestra.train(reward=odd, tasks=TASKS, config=plain, quiet=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    found = rows(tmp_path / "run", "SELECT * FROM verdicts")
    assert len(found) == len(server.asked) == 12
    assert all(row["judge"].startswith("audit: ") for row in found)
    assert rows(tmp_path / "run", "SELECT named_rewards FROM episodes WHERE named_rewards IS NOT NULL") == []
    last = done.metrics[-1]
    assert (last["audit/episodes"], last["audit/failed"], last["audit/calls"]) == (12, 0, 12)
    assert last["audit/agreement"] == -1
    assert last["audit/evidence"] > 0
    episode = json.loads(found[0]["members"])[0][0]
    assert main(["episodes", str(tmp_path / "run"), episode, "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["verdicts"]] == ["audit/good"]


def test_an_audit_that_fails_has_no_score(tmp_path):
    def fails(asked: Asked) -> Any:
        broken = hashlib.sha256(asked.text.encode()).digest()[0] % 2
        return (400, b"too long") if broken else even(asked)

    with judging(fails) as server:
        settings = config(tmp_path / "run", server.url, steps=1, episodes=16)
        done = palestra.train(reward=odd, tasks=TASKS, config=settings, quiet=True)
    row = done.metrics[-1]
    assert row["audit/failed"] > 0
    assert row["audit/episodes"] + row["audit/failed"] == 16
    assert row["audit/episodes"] == len(rows(tmp_path / "run", "SELECT * FROM verdicts"))
    assert row["train/episodes"] == 16


def test_a_missing_reward_counts_in_an_audit_as_in_the_step(tmp_path):
    def named(task: dict[str, Any], answer: str) -> dict[str, float | None]:
        return {"odd": odd(task, answer), "full": None if digits(answer) % 2 else 1.0}

    settings = judged(tmp_path / "run", steps=1, audit={})
    row = palestra.train(reward=named, tasks=TASKS, config=settings, quiet=True).metrics[-1]
    assert 0 < row["train/rewards/odd"] < 1
    assert row["audit/others/odd"] == pytest.approx(1.0)
    assert row["audit/others/full"] == pytest.approx(row["train/rewards/odd"])


@pytest.mark.parametrize("action", ["warn", "hold"])
def test_an_audit_that_cannot_be_asked_ends_a_job_only_if_it_may_hold(tmp_path, action):
    with judging(lambda asked: (401, b"who are you")) as server:
        settings = config(tmp_path / "run", server.url, action=action)
        if action == "hold":
            with pytest.raises(ConfigError, match=r"refuses.*judge"):
                palestra.train(reward=odd, tasks=TASKS, config=settings, quiet=True)
            return
        done = palestra.train(reward=odd, tasks=TASKS, config=settings, quiet=True)
    assert done.state == "completed"
    (event,) = rows(tmp_path / "run", "SELECT data FROM events WHERE kind = 'warning' AND data LIKE '%audit_ended%'")
    assert "refuses to judge" in event["data"]


def test_a_group_is_audited_by_ranks_and_the_judge_of_the_job_is_probed(tmp_path):
    def judge(asked: Asked) -> str:
        if "replies" in asked.data:
            return asked.rank(lambda text: -(digits(text) % 2))
        return odd_too(asked)

    with judging(judge) as server:
        ranks = {"judge": {"kind": "relative", "url": server.url}, "episodes": 16}
        settings = config(tmp_path / "run", server.url, steps=1).model_dump(mode="json", exclude_none=True)
        settings |= {"audit": ranks}
        own = Rubric(url=server.url, criteria=[Criterion(name="odd", text="?")])
        done = palestra.train(reward=own, tasks=TASKS, config=parse_config(settings), quiet=True)
    row = done.metrics[-1]
    assert row["audit/episodes"] == 16
    assert row["audit/agreement"] < 0
    assert row["audit/null_replies"] == 24
    assert 0 < row["audit/null_share"] < 1  # those with the question have digits
    assert row["judge/verdicts"] == 16  # those of the audit are not among them


@pytest.fixture
def soon(monkeypatch):
    """An alarm after a few steps."""
    monkeypatch.setattr(evidence, "ALARM", 1.0)


def test_a_divergence_is_a_warning_that_names_episodes(tmp_path, soon):
    with judging(even) as server:
        settings = config(tmp_path / "run", server.url, steps=6, episodes=16)
        done = palestra.train(reward=odd, tasks=TASKS, config=settings, quiet=True)
    assert done.state == "completed"
    (finding,) = [one for one in examine(tmp_path / "run").findings if one.code == "audit_diverges"]
    assert finding.steps > 0
    assert 0 < len(finding.episodes) <= 5
    assert finding.episodes[0].startswith("train-")
    query = f"SELECT scores FROM verdicts WHERE members LIKE '%{finding.episodes[0]}%'"
    assert '"good":0.0' in rows(tmp_path / "run", query)[0]["scores"]
    warned = rows(tmp_path / "run", "SELECT data FROM events WHERE kind = 'warning'")
    assert any("audit_diverges" in row["data"] for row in warned)
    assert read_quarantine(tmp_path / "run" / "checkpoints") is None


@pytest.mark.slow
def test_pause_ends_the_job_before_the_version_exists_and_warn_goes_on(tmp_path, soon):
    with judging(even) as server:
        settings = config(tmp_path / "run", server.url, steps=8, episodes=16, action="pause")
        for resume in (False, True):
            with pytest.raises(VersionQuarantined, match=r"episodes: train-|audit.action"):
                palestra.train(reward=odd, tasks=TASKS, config=settings, resume=resume, quiet=True)
        held = read_quarantine(tmp_path / "run" / "checkpoints")
        assert held is not None
        saved = [int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
        assert max(saved, default=0) < held.step
        versions = rows(tmp_path / "run", "SELECT max(step) AS step FROM metric_rows")
        assert versions[0]["step"] < held.step
        asked = len(server.asked)
        lifted = config(tmp_path / "run", server.url, steps=8, episodes=16)
        done = palestra.train(reward=odd, tasks=TASKS, config=lifted, resume=True, quiet=True)
    assert done.state == "completed"
    assert read_quarantine(tmp_path / "run" / "checkpoints") is None
    assert len(server.asked) - asked == 16 * (8 - held.step)  # the audit of the held step is known


async def _chat(job: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {job.plane.keys.playground_key}"}
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.post(f"{job.url}/v1/chat/completions", json=body, headers=headers)


async def _until(job: Any, states: set[str]) -> None:
    while job.progress.state.value not in states:
        await asyncio.sleep(0.02)


SCRIPT = """
import sys, palestra
from palestra.doctor import evidence
from test_audits import TASKS, config, odd
evidence.ALARM = 1.0
folder, url, resume = sys.argv[1:]
settings = config(folder, url, steps=8, episodes=16, action="hold")
palestra.train(reward=odd, tasks=TASKS, config=settings, resume=resume == "resume", quiet=True)
"""


def run_script(folder: Path, url: str, resume: str, fault: str = "") -> int:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    made = os.environ | {"PYTHONPATH": path, "PALESTRA_FAULT": fault}
    return subprocess.run([sys.executable, "-c", SCRIPT, folder, url, resume], env=made, timeout=170).returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["before_quarantine:1", "after_quarantine:1", "after_verdict_commit:20", "before_step:6"]
)
def test_a_held_version_stays_held_when_the_job_is_killed(tmp_path, fault):
    with judging(even) as server:
        assert run_script(tmp_path / "run", server.url, "new", fault) == -signal.SIGKILL
        stored = len(rows(tmp_path / "run", "SELECT * FROM verdicts"))
        before, known = len(server.asked), read_quarantine(tmp_path / "run" / "checkpoints")
        assert run_script(tmp_path / "run", server.url, "resume") == 0
        assert len(server.asked) - before == 16 * 8 - stored
        assert run_script(tmp_path / "whole", server.url, "new") == 0
    held, whole = (read_quarantine(tmp_path / name / "checkpoints") for name in ("run", "whole"))
    assert held == whole
    assert held is not None
    assert known in (None, held)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    numbers = [
        [
            {k: v for k, v in json.loads(row["data"]).items() if k.startswith("audit/") and k != "audit/seconds"}
            for row in of
        ]
        for of in (rows(tmp_path / name, "SELECT data FROM metric_rows ORDER BY step") for name in ("run", "whole"))
    ]
    assert numbers[0] == numbers[1]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--step", "8"]) == 2
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--step", "8", "--force"]) == 0


async def test_a_held_version_answers_nobody_but_the_jobs_own_episodes(tmp_path, soon):
    with judging(even) as server:
        settings = config(tmp_path / "run", server.url, steps=8, episodes=16, action="hold")
        settings = settings.model_copy(update={"server": settings.server.model_copy(update={"port": 0})})
        answered: list[int] = []
        async with local_job(settings, lambda kind, data: None) as job:
            job.opened.policies.held["policy"] = Quarantine(since=3, step=5, reason="gamed")
            await job.plane.store.tasks.push("train", [Task(task_id="t", data={"prompt": "say"})], "chunk")
            running = asyncio.create_task(job.run())
            await _until(job, {"running"})
            refused = await _chat(job)
            del job.opened.policies.held["policy"]
            answered.append((await _chat(job)).status_code)
            running.cancel()
            await asyncio.wait((running,))
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "version_quarantined"
    assert answered == [200]


async def test_a_resumed_job_without_an_audit_holds_back_what_was_held(tmp_path):
    settings = judged(tmp_path / "run", steps=1)
    palestra.train(reward=odd, tasks=TASKS, config=settings, quiet=True)
    write_quarantine(tmp_path / "run" / "checkpoints", held := Quarantine(since=1, step=1, reason="gamed"))
    settings = settings.model_copy(update={"server": settings.server.model_copy(update={"port": 0}), "steps": 2})
    async with local_job(settings, lambda kind, data: None) as job:
        running = asyncio.create_task(job.run())
        await _until(job, {"running"})
        assert job.opened.policies.held == {"policy": held}
        assert (await _chat(job)).status_code == 409
        running.cancel()
        await asyncio.wait((running,))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"audit": {"action": "hold"}}, "second judge"),
        ({"audit": {"episodes": 3}}, r"audit\.episodes"),
        ({"audit": {"judge": {"kind": "oracle"}}}, "known kinds"),
        ({"audit": {"action": "stop"}}, r"audit\.action"),
        ({"audit": {}, "algorithm": {"name": "sft"}}, "training episodes"),
        ({"audit": {}, "policies": {"a": {}, "b": {}}, "roles": {"x": "b"}}, "several policies"),
    ],
)
def test_an_audit_that_makes_no_sense_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(given)


def test_a_judge_that_audits_itself_is_refused():
    judge = audit("http://127.0.0.1:1")["judge"]
    with pytest.raises(ConfigError, match="same as"):
        parse_config({"judge": judge, "audit": {"judge": judge}})


def test_an_audit_is_no_part_of_what_is_trained():
    assert parse_config({}).digest() == parse_config({"audit": audit("http://127.0.0.1:1")}).digest()
