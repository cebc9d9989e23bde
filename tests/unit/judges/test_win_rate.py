"""Validation with a relative judge: what is compared, how often it is asked, and what is reported."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from judge_server import Asked, judging

import palestra
from palestra.cli.main import main
from palestra.learner.evaluation import win_rate
from palestra_judges import Relative
from unit.judges.test_jobs import config, rows

pytestmark = pytest.mark.ci

TASKS = [{"id": f"t{n}", "prompt": f"say {n}"} for n in range(12)]


def value(text: str) -> int:
    """What a reply is worth: 0, 1 or 2, so that some are worth the same."""
    return hashlib.sha256(text.encode()).digest()[0] % 3


def replies(folder: Path, version: int) -> list[str]:
    """The replies in the order of the tasks."""
    query = f"""SELECT chats.reply FROM chats JOIN episodes USING (episode_id, fence)
        JOIN groups USING (kind, group_index)
        WHERE kind = 'validation' AND step = {version} ORDER BY group_index"""
    found = [json.loads(row["reply"])["content"] for row in rows(folder, query)]
    return ["".join(part["text"] for part in content) for content in found]


def train(folder: Path, url: str, resume: bool = False, orders: Any = 2, **changes: Any) -> list[dict[str, Any]]:
    settings = config(folder, **{"evaluation": {"every_steps": 1}} | changes)
    judge = Relative(url=url, orders=orders)
    done = palestra.train(
        reward=judge, tasks=TASKS[:3], validation_tasks=TASKS, config=settings, resume=resume, quiet=True
    )
    return done.metrics


@pytest.mark.parametrize("orders", [1, 2])
def test_the_win_rate_is_that_of_the_replies_whatever_position_the_judge_prefers(orders, tmp_path):
    def judge(asked: Asked) -> str:
        return asked.rank(value, bias=0.5)  # decides only between replies of one value

    with judging(judge) as server:
        metrics = train(tmp_path / "run", server.url, orders=orders)
        asked = [one for one in server.asked if len(one.data["replies"]) == 2 and "question" in one.data]
        questions = len(server.asked)
        assert train(tmp_path / "run", server.url, resume=True, orders=orders) == metrics
        assert len(server.asked) == questions
    assert asked
    first = replies(tmp_path / "run", 0)
    assert len(first) == len(TASKS)
    assert "validation/win_rate" not in metrics[0]
    for step in (1, 2):
        pairs = [(value(old), value(new)) for old, new in zip(first, replies(tmp_path / "run", step), strict=True)]
        wins, losses = sum(new > old for old, new in pairs), sum(new < old for old, new in pairs)
        assert 0 < wins + losses < len(TASKS)
        found = [metrics[step][f"validation/win_rate{end}"] for end in ("", "_low", "_high")]
        assert found == list(win_rate(wins, losses, len(TASKS)))


def test_a_task_is_left_out_if_the_judge_fails_or_version_0_has_no_reply(tmp_path, capsys):
    def judge(asked: Asked) -> str:
        if asked.data.get("question") == "say 1" and len(asked.data["replies"]) == 2:
            return "I can't say."
        return asked.rank(len)

    run = tmp_path / "run"
    with judging(judge) as server:
        metrics = train(run, server.url, steps=1)
        assert metrics[1]["validation/scored"] == len(TASKS) - 1
        first, second = replies(run, 0), replies(run, 1)
        lengths = [(len(old), len(new)) for n, (old, new) in enumerate(zip(first, second, strict=True)) if n != 1]
        wins, losses = sum(new > old for old, new in lengths), sum(new < old for old, new in lengths)
        assert metrics[1]["validation/win_rate"] == win_rate(wins, losses, len(TASKS) - 1).mean
        with sqlite3.connect(run / "run.db") as store:
            store.execute("UPDATE episodes SET state = 'discarded' WHERE episode_id = 'validation-000002-00'")
        capsys.readouterr()
        settings = config(run, evaluation={"every_steps": 1}, steps=2)
        palestra.train(
            reward=Relative(url=server.url), tasks=TASKS[:3], validation_tasks=TASKS, config=settings, resume=True
        )
    said = capsys.readouterr().out
    (newest,) = (row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["step"] == 2)
    assert newest["validation/scored"] == len(TASKS) - 2
    assert f"win rate {newest['validation/win_rate']:.2f} (" in said
    lost = rows(run, "SELECT task_id, reason FROM episodes WHERE kind = 'validation' AND group_index >= 24")
    assert [(row["task_id"], row["reason"][:12]) for row in lost if row["reason"]] == [
        ("t1", "judge_failed"),
        ("t2", "judge_failed"),
    ]
    assert main(["episodes", str(run), "validation-000027-00"]) == 0
    assert "because: worth" in capsys.readouterr().out


SCRIPT = """
import sys
from pathlib import Path
from unit.judges.test_win_rate import train
train(Path(sys.argv[1]), sys.argv[2], resume=sys.argv[3] == "resume", steps=1)
"""


@pytest.mark.slow
def test_a_job_that_was_killed_in_a_validation_asks_for_no_stored_verdict_again(tmp_path):
    def run(folder: Path, resume: str, fault: str = "") -> int:
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        made = os.environ | {"PYTHONPATH": path, "PALESTRA_FAULT": fault}
        words = [sys.executable, "-c", SCRIPT, str(folder), server.url, resume]
        return subprocess.run(words, env=made, timeout=170).returncode

    with judging(lambda asked: asked.rank(value, bias=0.5)) as server:
        assert run(tmp_path / "killed", "new", "after_verdict_commit:15") == -signal.SIGKILL
        stored, before = rows(tmp_path / "killed", "SELECT * FROM verdicts"), len(server.asked)
        assert any(row["kind"] == "validation" for row in stored)
        assert run(tmp_path / "killed", "resume") == 0
        again = len(server.asked) - before
        assert run(tmp_path / "whole", "new") == 0
        assert again == len(server.asked) - before - again - sum(bool(row["calls"]) for row in stored)
    names = ("validation/win_rate", "validation/win_rate_low", "validation/win_rate_high")
    killed, whole = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("killed", "whole")
    )
    assert [killed[name] for name in names] == [whole[name] for name in names]
