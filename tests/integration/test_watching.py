"""Watching a job, and giving it work: status, events, metrics, models; claims and tasks that may be sent twice."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from outcome import assert_complete
from prometheus_client.parser import text_string_to_metric_families
from servers import KEY, SCRIPTED, Job, Plane, until

from palestra import AsyncClient, Client
from palestra.client import Worker

PAGE = (  # what the page shows of a run
    "",
    "/metrics",
    "/calls",
    "/costs",
    "/findings",
    "/settings",
    "/history",
    "/steps/{step}",
    "/groups/{kind}/{group}",
    "/episodes",
    "/episodes/{episode}",
    "/episodes/{episode}/rows/{row}",
    "/episodes/{episode}/calls/{call}",
    "/pictures/{digest}",
    "/pictures/{digest}/seen/{policy}",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    """A job that waits for its tasks, so that nothing happens by itself."""
    with Job(tmp_path_factory.mktemp("watching"), {**SCRIPTED, "steps": 100}, tasks=(), validation=()) as job:
        job.start()
        yield job


@pytest.fixture(scope="module")
def plane(job) -> Iterator[Plane]:
    with Plane(job.url) as plane:
        yield plane


def event_blocks(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Server-sent events as their fields."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield fields
            fields = {}


def events(plane: Plane, **headers: str) -> list[dict[str, str]]:
    """All that there are now."""
    answer = plane.get("/events?follow=false", headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return list(event_blocks(iter(answer.text.splitlines())))


def lease_runs_out(plane: Plane) -> str:
    """Make an event happen; returns the episode."""
    episode_id = str(plane.claim(allow_discard_timeout=0.05)["episode_id"])
    until(lambda: any(episode_id in event["data"] for event in events(plane)), "its lease runs out")
    return episode_id


# Events


@pytest.mark.slow
def test_events_can_be_replayed_from_any_of_them(plane):
    for _ in range(3):
        lease_runs_out(plane)
    everything = events(plane)
    numbers = [int(event["id"]) for event in everything]
    assert numbers == sorted(set(numbers))
    assert everything[0]["event"] == "running"
    for number, event in enumerate(everything):
        assert events(plane, **{"last-event-id": event["id"]}) == everything[number + 1 :]
        assert json.loads(event["data"]).keys() >= {"at", "kind"}


@pytest.mark.slow
def test_events_are_followed_as_they_happen(plane):
    lease_runs_out(plane)
    before = events(plane)
    headers = {"authorization": f"Bearer {KEY}", "last-event-id": before[-2]["id"]}
    with plane.http.stream("GET", f"{plane.url}/events", headers=headers, timeout=20) as stream:
        following = event_blocks(stream.iter_lines())
        assert next(following) == before[-1]
        episode_id = lease_runs_out(plane)
        new = next(following)
    assert new["event"] == "lease_expired"
    assert json.loads(new["data"])["episode_id"] == episode_id


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "²"])
def test_a_last_event_id_that_is_no_number_is_422(plane, last):
    answer = plane.get("/events", headers={"last-event-id": last.encode()})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "last-event-id"


@pytest.mark.slow
def test_who_follows_a_job_hears_of_its_end_and_then_the_stream_ends(tmp_path):
    with Job(tmp_path, SCRIPTED | {"steps": 1}) as job, Plane(job.url) as plane:
        job.start()
        headers = {"authorization": f"Bearer {KEY}"}
        with plane.http.stream("GET", f"{plane.url}/events", headers=headers, timeout=30) as stream:
            job.work()
            kinds = [event["event"] for event in event_blocks(stream.iter_lines())]
        job.finish()
    # The warning says that the gradient is 0, which is so with the trainer that only records.
    assert [kind for kind in kinds if kind != "saved"] == [
        "running", "evaluated", "step", "evaluated", "warning", "step", "completed"
    ]  # fmt: skip


# Status, metrics, models, the description of the API


def test_status_counts_episodes_and_calls(plane):
    before = plane.status()
    episode = plane.claim()
    assert plane.chat(episode).status_code == 200
    during = plane.status()
    assert plane.end(episode).status_code == 200
    after = plane.status()
    assert (before["state"], before["step"], before["steps"], before["policies"]) == ("running", 0, 100, ["policy"])
    assert during["episodes"]["claimed"] == before["episodes"]["claimed"] + 1
    assert during["calls"]["calls"] == before["calls"].get("calls", 0) + 1
    assert after["episodes"]["completed"] == before["episodes"]["completed"] + 1
    assert after["calls"]["in_flight"] == 0


def test_metrics_are_prometheus_text_and_say_what_status_says(plane):
    plane.chat(plane.claim())
    families = {family.name: family for family in text_string_to_metric_families(plane.get("/metrics").text)}
    status = plane.status()
    episodes = {s.labels["state"]: s.value for s in families["palestra_episodes"].samples}
    assert episodes == status["episodes"]
    calls = {s.labels["what"]: s.value for s in families["palestra_calls"].samples}
    assert calls["calls"] == status["calls"]["calls"]
    assert families["palestra_calls"].type == "counter"
    spent = {s.labels["state"] for s in families["palestra_turn_seconds"].samples}
    assert spent >= {"pending", "generating"}
    assert families["palestra_step"].samples[0].value == status["step"]
    requests = {s.labels["state"]: s.value for s in families["palestra_engine_requests"].samples}
    assert requests == {"waiting": 0, "running": 0}
    tokens = {s.labels["what"]: s.value for s in families["palestra_engine_tokens"].samples}
    assert tokens["sampled"] == status["calls"]["completion_tokens"] > 0


async def test_models_are_the_policies_for_either_key(job, plane):
    episode = plane.claim()
    for key in (KEY, episode["api_key"]):
        async with openai.AsyncOpenAI(base_url=f"{job.url}/v1", api_key=key) as ai:
            assert [model.id async for model in ai.models.list()] == ["policy"]


def test_the_description_of_the_api_has_every_route(plane):
    described = plane.get("/openapi.json", None).json()
    routes = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert routes == {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("GET", "/v1/models"),
        ("POST", "/v1/checkpoints/{name}"),
        ("POST", "/engine/replicas"),
        ("POST", "/tasks"),
        ("POST", "/register_episode"),
        ("POST", "/claim_episode"),
        ("POST", "/observe_seat"),
        ("POST", "/act_seat"),
        ("POST", "/heartbeat_episode"),
        ("GET", "/episode_calls"),
        ("POST", "/end_episode"),
        ("POST", "/abort_episode"),
        ("GET", "/rollout"),
        ("GET", "/status"),
        ("GET", "/events"),
        ("GET", "/metrics"),
        ("PUT", "/pictures/{digest}"),
        ("GET", "/pictures/{digest}"),
        ("POST", "/dashboard/session"),
        ("GET", "/dashboard/api/events"),
        ("GET", "/dashboard/api/runs"),
        *(("GET", f"/dashboard/api/runs/{{run}}{view}") for view in PAGE),
    }
    for method, path in routes:
        operation = described["paths"][path][method.lower()]
        assert {"401", "403"} <= operation["responses"].keys()
        assert operation["description"]


# Claims


def test_a_claim_that_is_sent_again_gets_the_same_episode_and_the_same_key(plane):
    body = {"request_id": "claim-once", "episode_id": plane.register()}
    first, second = (plane.post("/claim_episode", body).json()["episode"] for _ in range(2))
    assert first == second
    assert plane.chat(second).status_code == 200
    assert plane.end(first).status_code == 200
    late = plane.post("/claim_episode", body)
    assert late.status_code == 409
    assert late.json()["error"]["code"] == "claim_over"


def test_registering_twice_under_one_request_id_is_one_episode(plane):
    body = {"task": {"data": {"n": 1}}, "request_id": "register-once"}
    first, second = (plane.post("/register_episode", body).json()["episode_id"] for _ in range(2))
    assert first == second


def test_without_an_episode_a_claim_waits_as_long_as_it_asks_to(plane):
    started = time.monotonic()
    answer = plane.post("/claim_episode", {"request_id": "patient", "wait_seconds": 0.3}).json()
    assert 0.25 < time.monotonic() - started < 5
    assert (answer["status"], answer["episode"]) == ("waiting", None)


def test_a_waiting_claim_is_answered_when_an_episode_comes(tmp_path):
    with Job(tmp_path, {**SCRIPTED, "steps": 1}, tasks=(), validation=()) as job, Plane(job.url) as plane:
        job.start()
        answers: list[tuple[float, Any]] = []

        def wait() -> None:
            answer = httpx2.post(
                f"{job.url}/claim_episode",
                json={"request_id": "waits", "wait_seconds": 30},
                headers={"authorization": f"Bearer {KEY}"},
                timeout=60,
            )
            answers.append((time.monotonic(), answer.json()))

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: plane.status()["workers"] == 1, "the claim waits")
        pushed = time.monotonic()
        assert plane.post("/tasks", {"chunk_id": "c", "tasks": [{"data": {"text": "a"}}], "final": True}).is_success
        waiting.join(30)
        answered, answer = answers[0]
        assert answer["status"] == "claimed"
        assert answered - pushed < 5  # of the 30 that it would have waited


# Tasks


def test_a_chunk_that_is_sent_again_changes_nothing(plane):
    body = {"chunk_id": "first", "tasks": [{"data": {"n": n}} for n in range(3)], "split": "validation"}
    totals = [plane.post("/tasks", body).json()["total"] for _ in range(2)]
    assert totals == [3, 3]
    more = plane.post("/tasks", body | {"chunk_id": "second", "tasks": [{"data": {"n": n}} for n in (2, 3)]})
    assert more.json()["total"] == 4  # a task that is there already is not added
    other = plane.post("/tasks", body | {"tasks": [{"data": {"n": 9}}]})
    assert other.status_code == 409
    assert "first" in other.json()["error"]["message"]


def test_a_task_id_means_one_task(plane):
    body = {"chunk_id": "ids", "tasks": [{"id": "a", "data": {"n": 1}}], "split": "validation"}
    assert plane.post("/tasks", body).status_code == 200
    other = plane.post("/tasks", body | {"chunk_id": "ids-2", "tasks": [{"id": "a", "data": {"n": 2}}]})
    assert other.status_code == 409
    assert "'a'" in other.json()["error"]["message"]


@pytest.mark.slow
def test_after_the_final_chunk_no_more_tasks_are_taken(tmp_path):
    with Job(tmp_path, SCRIPTED, tasks=(), validation=()) as job, Plane(job.url) as plane:
        job.start()
        final = {"chunk_id": "f", "tasks": [{"data": {"text": "a"}}], "final": True}
        assert [plane.post("/tasks", final).status_code for _ in range(2)] == [200, 200]
        assert plane.post("/tasks", final | {"chunk_id": "g", "tasks": [{"data": {"text": "b"}}]}).status_code == 409


@pytest.mark.slow
def test_tasks_that_are_pushed_train_as_those_of_a_file_do(tmp_path, undisturbed):
    with Job(tmp_path, SCRIPTED, tasks=(), validation=()) as job:
        job.start()
        with Client(job.url, KEY) as client:
            for _ in range(2):
                client.push_tasks(list(undisturbed.tasks), list(undisturbed.validation))
        job.work()
        job.finish()
        assert job.weights() == undisturbed.weights()


# The asynchronous client


@pytest.mark.slow
async def test_the_asynchronous_worker_plays_a_whole_job_and_an_exception_is_no_reward(tmp_path):
    broken = itertools.count()

    async def rollout(task: dict[str, Any], policy: Any) -> float:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as ai:
            messages: Any = [{"role": "user", "content": task["text"]}]
            reply = await ai.chat.completions.create(model=policy.model, messages=messages)
        if next(broken) % 4 == 3:
            raise RuntimeError("the environment broke")
        return float(len(reply.choices[0].message.content or ""))

    settings = SCRIPTED | {"rollout": {"group_size": 3, "groups_per_step": 2, "max_attempts": 10}}
    with Job(tmp_path, settings) as job:
        job.start()
        async with AsyncClient(job.url, KEY, worker_id="async") as client:
            worker = Worker(client, rollout, 8)
            await worker.run()
        job.finish()
        counts = worker.counts
        assert counts["played"] == 3 * 6 + 4 * 2
        assert counts["failed"] == (counts["played"] + counts["failed"]) // 4
        reasons = job.query("SELECT reason, attempts FROM episodes WHERE attempts > 1")
        assert sum(row["attempts"] - 1 for row in reasons) == counts["failed"]
        (reason,) = {row["reason"] for row in reasons}
        assert reason.startswith("RuntimeError: the environment broke (test_watching.py:")


def break_off(client: Client, episodes: list[str]) -> None:
    with client.episode() as episode:
        assert episode is not None
        episodes.append(episode.episode_id)
        raise ZeroDivisionError


@pytest.mark.slow
def test_a_with_block_ends_its_episode_or_gives_it_back(tmp_path):
    with Job(tmp_path, SCRIPTED | {"steps": 1}, validation=()) as job:
        job.start()
        with Client(job.url, KEY) as client:
            given_back = []
            with pytest.raises(ZeroDivisionError):
                break_off(client, given_back)
            while True:
                with client.episode() as episode:
                    if episode is None:
                        break
                    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as ai:
                        ai.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "?"}])
                    episode.reward, episode.metadata = 0.5 + (episode.episode_id in given_back), {"note": "played"}
        job.finish()
        rows = {row["episode_id"]: row for row in job.query("SELECT * FROM episodes")}
        assert rows[given_back[0]]["attempts"] == 2
        assert json.loads(rows[given_back[0]]["rewards"]) == {"agent": 1.5}
        assert {json.loads(row["metadata"])["note"] for row in rows.values()} == {"played"}


# Many workers


@pytest.mark.slow
def test_two_worker_processes_of_four_threads_play_each_episode_once(tmp_path, undisturbed):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        for _ in range(2):
            job.work("--threads", "4")
        job.finish()
        assert_complete(job)
        assert job.weights() == undisturbed.weights()
        claimed = [entry["episode"] for entry in job.worker_log("claimed")]
        assert len(claimed) == len(set(claimed)) == 20
        assert job.worker_log("lost") == []
        assert all(row["attempts"] == 1 for row in job.query("SELECT attempts FROM episodes"))


@pytest.mark.slow
def test_a_job_that_is_over_waits_until_every_loop_of_its_workers_has_heard_so(tmp_path):
    settings = SCRIPTED | {"steps": 1, "rollout": {"group_size": 2, "groups_per_step": 1}}
    with Job(tmp_path, settings, validation=()) as job, Plane(job.url) as plane:
        server = job.start()
        claims = ({"worker_id": "one name", "request_id": f"claim {n}", "wait_seconds": 30} for n in range(4))
        playing = [plane.post("/claim_episode", next(claims)).json()["episode"] for _ in range(2)]  # two loops of it
        for episode in playing:
            assert plane.end(episode, 1.0).status_code == 200
        assert plane.post("/claim_episode", next(claims)).json()["status"] == "finished"
        with pytest.raises(subprocess.TimeoutExpired):
            server.popen.wait(0.5)
        assert plane.post("/claim_episode", next(claims)).json()["status"] == "finished"
        assert server.wait(5) == 0
