"""A budget is exceeded by nothing: with many workers at the real server, and when the server is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import time

import httpx2
import pytest
from servers import SCRIPTED, Job

from palestra.client import AsyncClient, Worker
from palestra.config import load_saved_config, parse_config
from palestra.learner.metrics import SPENT_METRICS
from palestra.runtime.local import local_job
from palestra.runtime.spending import recorded_loading
from palestra.store.browsing import browse
from palestra.store.spending import Used, loading_ms, spent_ms, sums, usage_of_calls
from palestra.types.records import Task

pytestmark = pytest.mark.ci

WORKERS = 64


def totals(used: list[Used]) -> tuple[int, int]:
    return sum(one.prompt_tokens for one in used), sum(one.reply_tokens for one in used)


def spent(folder) -> tuple[int, int]:
    """The sums of a run, which are those of its recorded calls."""
    with browse(folder / "run.db") as connection:
        found = totals(sums(connection))
        calls = totals(list(usage_of_calls(connection, load_saved_config(folder))))
    assert found[0] >= calls[0]
    assert found[1] >= calls[1]
    return found


def codes(folder) -> list[str]:
    with sqlite3.connect(folder / "run.db") as db:
        query = "SELECT data ->> 'code' FROM events WHERE kind = 'warning' AND data ->> 'code' LIKE 'budget%'"
        return [code for (code,) in db.execute(f"{query} ORDER BY event_id")]


@pytest.mark.parametrize(
    ("budget", "prices"),
    [({"tokens": 12_000}, None), ({"money": 0.006}, {"tokens": {"policy": [0.3, 0.9]}})],
    ids=["tokens", "money"],
)
async def test_64_workers_exceed_no_budget(tmp_path, budget, prices):
    config = parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "server": {"port": 0},
            "engine": {"kind": "fake", "reply_tokens": 40, "delay_seconds": 0.005},
            "policies": {"policy": {"sampling": {"max_tokens": 64}}},
            "rollout": {"group_size": 8, "groups_per_step": 8},
            "checkpoint": {"every_steps": 1},
            "steps": 1000,
            "budget": budget,
            **({} if prices is None else {"prices": prices}),
        }
    )
    async with local_job(config, lambda kind, data: None) as job:
        store, metering = job.plane.store, job.opened.metering
        assert metering is not None
        await store.tasks.push("train", [Task(task_id=f"t{n}", data={"text": f"say {n}"}) for n in range(9)], "tasks")
        await store.tasks.seal()

        async with httpx2.AsyncClient(timeout=60) as http, AsyncClient(job.url, job.api_key) as client:

            async def play(task, endpoint) -> float:
                body = {"model": endpoint.model, "messages": [{"role": "user", "content": task["text"]}]}
                headers = {"authorization": f"Bearer {endpoint.api_key}"}
                reply = await http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)
                return float(len(reply.json()["choices"][0]["message"]["content"]) % 2)

            workers = [asyncio.create_task(Worker(client, play, 1).run()) for _ in range(WORKERS)]
            await job.run()
            await job.linger()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        step, ledger = job.progress.step, metering.ledger
    assert job.progress.state.value == "completed"
    prompts, replies = spent(tmp_path / "run")
    assert ledger.total.tokens == prompts + replies
    assert ledger._held_tokens == ledger._held_money == 0
    if prices is None:
        assert 6_000 < prompts + replies <= 12_000
    else:
        units = prompts * 300_000_000 + replies * 900_000_000  # 0.3 and 0.9 a million
        assert ledger.total.money == units <= 6 * 10**12
        assert units > 3 * 10**12
    assert codes(tmp_path / "run") == ["budget_50", "budget_80", "budget_100"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {metric.name for metric in SPENT_METRICS} <= rows[-1].keys()
    assert rows[-1]["cost/tokens"] <= prompts + replies
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert step >= 1
    assert checkpoints[-1].name.endswith(str(step))


async def test_a_job_whose_hours_are_used_up_at_its_start_completes_and_says_why(tmp_path):
    config = parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "server": {"port": 0},
            "engine": {"kind": "fake"},
            "budget": {"hours": 1e-7},
        }
    )
    said = []
    async with local_job(config, lambda kind, data: said.append(kind)) as job:
        await job.run()
        await job._until_spent(job._budget)  # what completes while it closes is not completed twice
    assert job.progress.state.value == "completed"
    assert codes(tmp_path / "run")[-1] == "budget_100"
    assert said[-1] == "completed"
    assert said.count("completed") == 1


async def test_the_time_of_a_start_that_was_killed_while_it_loaded_counts(tmp_path):
    async with recorded_loading(tmp_path, time.monotonic() - 7.0):
        await asyncio.sleep(0.1)  # then it is killed, and so never opens the store
    assert 7_000 <= loading_ms(tmp_path) < 8_000
    config = parse_config({"run_dir": str(tmp_path), "server": {"port": 0}, "engine": {"kind": "fake"}, "prices": {}})
    async with local_job(config, lambda kind, data: None) as job:
        with browse(tmp_path / "run.db") as connection:
            assert 7_000 <= spent_ms(connection) < 30_000  # before it runs
        assert loading_ms(tmp_path) == 0
        assert job.opened.metering.ledger.total.ms >= 7_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["training", "inference"])
async def test_the_end_of_a_budget_is_said_before_the_end_of_the_job(tmp_path, kind):
    config = parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "kind": kind,
            "steps": 1000,
            "server": {"port": 0},
            "engine": {"kind": "fake"},
            "budget": {"tokens": 1200},
            "policies": {"policy": {"sampling": {"max_tokens": 16}}},
            **({"environment": {"name": "gomoku"}} if kind == "training" else {}),
        }
    )
    said = []
    async with local_job(config, lambda what, data: said.append((what, data.get("code")))) as job:
        if kind == "training":
            await job.run()
        else:
            serving = asyncio.create_task(job.run())
            headers = {"authorization": f"Bearer {job.api_key}"}
            async with httpx2.AsyncClient(timeout=60, headers=headers) as http:
                body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
                long = [{"role": "user", "content": "x" * 1500}]
                large = await http.post(f"{job.url}/v1/chat/completions", json=body | {"messages": long})
                assert (large.status_code, large.json()["error"]["code"]) == (402, "budget_spent")
                answer = await http.post(f"{job.url}/v1/chat/completions", json=body)
                assert answer.status_code == 200  # a larger one has not ended the job
                while (answer := await http.post(f"{job.url}/v1/chat/completions", json=body)).status_code == 200:
                    pass
                assert (answer.status_code, answer.json()["error"]["code"]) == (402, "budget_spent")
            await serving
    assert job.progress.state.value == "completed"
    end = ("completed" if kind == "training" else "served", None)
    assert said.count(end) == 1
    assert said.index(("warning", "budget_100")) < said.index(end)


@pytest.mark.slow
def test_a_killed_job_goes_on_with_what_was_spent(tmp_path):
    settings = SCRIPTED | {"policies": {"policy": {"sampling": {"max_tokens": 8}}}}
    with Job(tmp_path, settings | {"budget": {"tokens": 1100, "hours": 1.0}}) as job:
        server = job.start(fault="after_chat_commit:9")
        job.work()
        assert server.wait() == -signal.SIGKILL
        before = sum(spent(job.run_dir))
        assert before > 0
        server = job.start("--resume", fault="after_chat_commit:5")
        assert server.wait() == -signal.SIGKILL
        assert before < sum(spent(job.run_dir)) <= 1100
        server = job.start("--resume")
        job.finish()
        assert "the budget is spent" in server.output
        found = sum(spent(job.run_dir))
        assert before < found <= 1100
        assert codes(job.run_dir).count("budget_100") == 1
        with browse(job.run_dir / "run.db") as connection:
            assert spent_ms(connection) > 0
