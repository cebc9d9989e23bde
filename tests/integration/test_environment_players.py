"""Episodes that a worker plays in an environment of its own are those that the job's process would play."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from dataclasses import replace

import httpx2
import pytest
from fleet_environments import Echo, Named, Pair, Thinks

from palestra.agents import ModelAgent, RandomAgent
from palestra.client import AsyncClient, Worker
from palestra.client.exchange import Endpoint
from palestra.config import parse_config
from palestra.envs.arithmetic import CalculatorEnvironment
from palestra.rollout import EnvironmentPlayer, RolloutSpec
from palestra.runtime.local import local_job

pytestmark = pytest.mark.ci

TASKS = [{"text": f"task {n}", "prompt": f"12 * {n} =", "answer": str(12 * n)} for n in range(4)]
JOB = {
    "engine": {"kind": "fake", "reply_tokens": 6},
    "server": {"port": 0},
    "steps": 2,
    "deterministic": True,
    "rollout": {"group_size": 3, "groups_per_step": 2},
    "checkpoint": {"every_steps": 2},
    "evaluation": {"every_steps": 0},
}
DRAWS = RolloutSpec(environment=Pair, agents={"left": RandomAgent(lambda seen: "abcdefg"), "": ModelAgent()})
SYSTEM = {"environment": {"system": "Add."}}
BETWEEN = {"rollout": JOB["rollout"] | {"weight_sync": "between_episodes"}}
TWO = {
    "policies": {"white": {}, "black": {}},
    "roles": {"left": "white", "right": "black"},
    "algorithm": {"credit": "step"},
}


def job(folder, **more):
    return parse_config({"run_dir": str(folder), **JOB, **more})


async def play(folder, spec, *, outside: bool, **more) -> list[dict]:
    """Train, and return what is stored of each episode, and the weights."""
    config = job(folder, **more)
    own = None if outside else replace(spec, system=config.environment.system)  # as `train` does
    async with local_job(config, lambda *_: None, own) as running:
        work = asyncio.create_task(running.run())
        async with AsyncClient(running.url, running.api_key, worker_id="outside") as client:
            await client.push_tasks(TASKS)
            if outside:
                await Worker(client, EnvironmentPlayer(client, spec, await client.facts()), 3).run()
            await work
    columns = "episode_id, state, rewards, step_rewards, named_rewards, agent_step_rewards, metadata, step_times"
    with sqlite3.connect(folder / "run.db") as store:
        store.row_factory = sqlite3.Row
        rows = [dict(row) for row in store.execute(f"SELECT {columns} FROM episodes ORDER BY episode_id")]
        calls = "SELECT episode_id, agent, time_step, policy, count(*) AS calls FROM chats GROUP BY 1, 2, 3, 4"
        rows += [dict(row) for row in store.execute(f"{calls} ORDER BY 1, 2, 3, 4")]
    for row in rows:
        if "step_times" in row:
            row["step_times"] = [[time is not None for time in step] for step in json.loads(row["step_times"])]
    return [*rows, *(path.read_text() for path in sorted(folder.glob("checkpoints/**/weights.txt")))]


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        pytest.param(RolloutSpec(environment=Echo), {}, id="serial"),
        pytest.param(
            RolloutSpec(environment=Named),
            {"algorithm": {"reward_weights": {"sum": 3.0}}},
            id="named",
            marks=pytest.mark.slow,
        ),
        pytest.param(RolloutSpec(environment=Pair), TWO, id="two policies", marks=pytest.mark.slow),
        pytest.param(RolloutSpec(environment=Echo, agents={"": Thinks()}), {}, id="agent", marks=pytest.mark.slow),
        pytest.param(DRAWS, {}, id="draws", marks=pytest.mark.slow),
        pytest.param(RolloutSpec(environment=CalculatorEnvironment), {}, id="tools", marks=pytest.mark.slow),
        pytest.param(RolloutSpec(environment=Echo), SYSTEM, id="system", marks=pytest.mark.slow),
        pytest.param(RolloutSpec(environment=Echo), BETWEEN, id="weights between episodes", marks=pytest.mark.slow),
    ],
)
async def test_what_is_recorded_and_trained_is_the_same(tmp_path, spec, more):
    inside = await play(tmp_path / "inside", spec, outside=False, **more)
    outside = await play(tmp_path / "outside", spec, outside=True, **more)
    assert inside == outside
    assert any(isinstance(row, str) for row in inside)


@pytest.mark.slow
async def test_a_request_or_an_answer_that_is_lost_changes_nothing(tmp_path, monkeypatch):
    """Every request is lost once before it reaches the server, and once more with its answer."""
    spec = RolloutSpec(environment=Echo)
    undisturbed = await play(tmp_path / "inside", spec, outside=False)
    request, lost = httpx2.AsyncClient.request, Counter()

    async def loses(self, method, url, **more):
        known = (url, more["content"], more["headers"]["authorization"])
        lost[known] += 1
        if lost[known] == 1:
            raise httpx2.ConnectError("the request was lost")
        answer = await request(self, method, url, **more)
        if lost[known] == 2:
            raise httpx2.ReadError("the answer was lost")
        return answer

    monkeypatch.setattr(httpx2.AsyncClient, "request", loses)
    monkeypatch.setattr(Endpoint, "backoff", lambda self, attempt: 0.01)
    disturbed = await play(tmp_path / "outside", spec, outside=True)
    assert disturbed == undisturbed
    assert len(lost) >= 12 * 4, "of each episode a claim, two calls and an end"
    assert min(count for (url, *_), count in lost.items() if "claim" not in url) >= 3


async def test_a_claim_that_is_answered_while_its_worker_is_told_to_end_is_given_back(tmp_path, monkeypatch):
    """The answer is on its way when the worker drains: else the episode would wait for the end of a lease."""
    request, answered = httpx2.AsyncClient.request, asyncio.Event()

    async def slow(self, method, url, **more):
        answer = await request(self, method, url, **more)
        if url.endswith("/claim_episode") and not answered.is_set():
            answered.set()
            await asyncio.sleep(60)
        return answer

    async with local_job(job(tmp_path), lambda *_: None) as running:
        work = asyncio.create_task(running.run())
        async with AsyncClient(running.url, running.api_key) as client:
            await client.push_tasks(TASKS)
            monkeypatch.setattr(httpx2.AsyncClient, "request", slow)
            worker = Worker(client, lambda task, endpoint: 1.0, 1)
            playing = asyncio.create_task(worker.run())
            await answered.wait()
            assert running.plane.store.leases.holders(9)
            worker.drain()
            async with asyncio.timeout(10):
                await playing
            assert not running.plane.store.leases.holders(9)
        running.stop()
        await work


async def test_a_worker_that_is_cancelled_has_given_back_its_claims_when_it_ends(tmp_path, monkeypatch):
    """What would still be sent afterwards comes too late: the client's connections are closed by then."""
    request, answered, open_requests = httpx2.AsyncClient.request, asyncio.Event(), Counter()

    async def counted(self, method, url, **more):
        open_requests["now"] += 1
        try:
            answer = await request(self, method, url, **more)
            open_requests["claims"] += url.endswith("/claim_episode")
            if open_requests["claims"] == 2:
                answered.set()
            if not playing.cancelling():
                await asyncio.sleep(60)
            return answer
        finally:
            open_requests["now"] -= 1

    async with local_job(job(tmp_path), lambda *_: None) as running:
        work = asyncio.create_task(running.run())
        async with AsyncClient(running.url, running.api_key) as client:
            await client.push_tasks(TASKS)
            monkeypatch.setattr(httpx2.AsyncClient, "request", counted)
            playing = asyncio.create_task(Worker(client, lambda task, endpoint: 1.0, 2).run())
            await answered.wait()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert open_requests["now"] == 0
            assert not running.plane.store.leases.holders(9)
        running.stop()
        await work


async def test_an_agent_outside_gets_the_ids_and_logprobs_that_the_server_has(tmp_path):
    got = []

    class Keeps(Thinks):
        async def step(self, observation, policy):
            chats, action = await super().step(observation, policy)
            got.extend(chats)
            return chats, action

    async with local_job(job(tmp_path, steps=1), lambda *_: None, None) as running:
        work = asyncio.create_task(running.run())
        async with AsyncClient(running.url, running.api_key) as client:
            await client.push_tasks(TASKS)
            spec = RolloutSpec(environment=Echo, agents={"": Keeps()})
            await Worker(client, EnvironmentPlayer(client, spec, await client.facts()), 3).run()
        await work
        played = await running.plane.store.calls.trajectories(sorted({chat.episode_id for chat in got}))
    kept = {(chat.episode_id, chat.index): chat for trajectory in played for chat in trajectory.chats}
    assert len(got) == len(kept) > 0
    for chat in got:
        own = kept[chat.episode_id, chat.index]
        assert chat.prompt_ids.tolist() == own.prompt_ids.tolist() != []
        assert chat.ids.tolist() == own.ids.tolist()
        assert chat.logprobs.tolist() == own.logprobs.tolist() != []
