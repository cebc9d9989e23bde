"""What the page of a service needs of the control plane: runs of jobs, changes of a tenant, places, rights, logs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import shutil
import sqlite3

import httpx2
import pytest

from palestra.config import JobConfig
from palestra.dashboard import streams as run_streams
from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run
from palestra.errors import NotFound
from palestra.http import sse
from palestra.http.sse import OpenStreams
from palestra.types.gpus import GpuReading, GpuUse
from palestra.types.states import JobState
from palestra_control.jobs import Resources
from palestra_service import page as service_page
from palestra_service.api import jobs_api, streams
from palestra_service.jobs.scheduler import RUN
from palestra_service.page import create_service_app
from palestra_service.placement.fitting import Node, RunningJob
from unit.control.building import api_routes, running, submit
from unit.dashboard.recorded import PICTURE_DIGEST, record

PARTS = {"step": "5", "kind": "train", "group": "0", "episode": "train-000000-00", "row": "0", "call": "1"}
PARTS |= {"digest": PICTURE_DIGEST, "policy": "policy"}
RUNS = "/dashboard/api/runs"


@pytest.fixture
async def keys(plane):
    """Headers by name: three users of one tenant, its admin, and a stranger."""
    admin = (await plane.administration.first_start()).secret
    found = {"admin": admin}
    async with client(plane) as http:
        for name, role in (("ann", "member"), ("bob", "member"), ("eve", "member")):
            made = await http.post("/users", json={"name": name, "role": role}, headers=bearing(admin))
            found[name] = made.json()["secret"]
        made = await http.post("/tenants", json={"name": "other"}, headers=bearing(admin))
        found["stranger"] = made.json()["secret"]
    return {name: bearing(secret) for name, secret in found.items()}


def bearing(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def client(plane) -> httpx2.AsyncClient:
    app = create_service_app(plane, asyncio.Event())
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://control")


async def with_run(plane, **values):
    """A job of ann whose run was recorded."""
    job = await submit(plane.store, "default", "ann", **values)
    folder = plane.scheduler.folder_of(job.job_id) / RUN
    folder.mkdir(parents=True)
    await record(folder)
    return job.job_id


def run_paths(plane, job_id: str) -> list[str]:
    routes = api_routes(create_service_app(plane, asyncio.Event()))
    found = [route.path for route in routes if route.path.startswith(f"{RUNS}/{{run}}")]
    values = PARTS | {"run": job_id}
    filled = [re.sub(r"\{(\w+)\}", lambda match: values[match[1]], path) for path in found]
    return [*filled, f"/dashboard/api/events?follow=false&after={job_id}:0"]


@pytest.mark.slow
async def test_the_runs_of_jobs_are_read_by_those_who_may_read_the_jobs(plane, keys):
    open_ = await with_run(plane)
    async with client(plane) as http:
        paths = run_paths(plane, open_)
        assert len(paths) == 16
        for path in paths:
            for name in ("ann", "bob", "eve", "admin"):
                answer = await http.get(path, headers=keys[name])
                assert answer.status_code == 200, (name, path, answer.text)
                assert answer.headers["cache-control"] == "no-store"
            strange = await http.get(path, headers=keys["stranger"])
            none = await http.get(path.replace(open_, "job-0"), headers=keys["stranger"])
            assert (strange.status_code, strange.text.replace(open_, "job-0")) == (404, none.text), path
        described = (await http.get(f"{RUNS}/{open_}", headers=keys["eve"])).json()
        assert (described["run"], described["title"], described["state"]) == (open_, "addition", "completed")
        assert described["serve"] == f"palestra submit --from-job {open_}"


@pytest.mark.slow
async def test_the_session_is_the_key_itself_and_a_key_in_an_address_or_cookie_is_none(plane, keys):
    async with client(plane) as http:
        answer = await http.post("/dashboard/session", headers=keys["eve"])
        secret = keys["eve"]["authorization"].removeprefix("Bearer ")
        assert answer.json() == {"key": secret, "service": True, "talk": None}
        assert answer.headers["cache-control"] == "no-store"
        for path, headers in ((f"/dashboard/session?key={secret}", {}), ("/dashboard/session", {"cookie": secret})):
            assert (await http.post(path, headers=headers)).status_code == 401
        page = await http.get("/dashboard")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert (await http.get("/")).headers["location"] == "/dashboard"


async def test_the_list_of_runs_is_that_of_the_running_jobs_that_one_sees(plane, keys):
    job = await running(plane.store, "default", "ann")
    await running(plane.store, "other", "zoe")
    folder = plane.scheduler.folder_of(job.job_id) / RUN
    folder.mkdir(parents=True)
    await record(folder)
    await with_run(plane)  # one that waits
    async with client(plane) as http:
        found = (await http.get(RUNS, headers=keys["eve"])).json()
        assert found["default_model"] == JobConfig().policies["policy"].model
        assert [(run["run"], run["steps"]) for run in found["runs"]] == [(job.job_id, 8)]
        assert found["version"]


@pytest.mark.slow
async def test_a_job_that_has_no_run_yet_is_said_to_have_none(plane, keys):
    job = await submit(plane.store, "default", "ann")
    async with client(plane) as http:
        answer = await http.get(f"{RUNS}/{job.job_id}", headers=keys["ann"])
        assert (answer.status_code, "has not begun" in answer.text) == (404, True)


@pytest.mark.slow
async def test_a_stream_of_runs_names_them_and_ends_with_its_key(plane, keys, monkeypatch):
    job = await with_run(plane)
    async with client(plane) as http:
        for query in ("", "?after=job", f"?after={job}:x"):
            answer = await http.get(f"/dashboard/api/events{query}", headers=keys["ann"])
            assert answer.status_code in (400, 422), query
        monkeypatch.setattr(run_streams, "CHECK_SECONDS", 0.02)
        monkeypatch.setattr(Run, "in_use", lambda _: True)
        following = asyncio.ensure_future(http.get(f"/dashboard/api/events?after={job}:0", headers=keys["eve"]))
        await asyncio.sleep(0.3)
        assert not following.done()
        await http.delete("/users/eve", headers=keys["admin"])
        async with asyncio.timeout(20):
            answer = await following
        sent = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        numbers = [one["event_id"] for one in sent if "event_id" in one]  # others say how far the run is
        assert numbers == sorted(set(numbers))
        assert numbers


def events_of(text: str) -> list[tuple[str, dict]]:
    blocks = [block.splitlines() for block in text.split("\n\n") if "data: " in block]
    return [(lines[1].removeprefix("event: "), json.loads(lines[2].removeprefix("data: "))) for lines in blocks]


async def test_changes_of_a_tenant_are_streamed_once_each_from_any_number(plane, keys):
    async with client(plane) as http:

        async def after(number: int | None, name: str) -> list[tuple[str, dict]]:
            last = {} if number is None else {"last-event-id": str(number)}
            return events_of((await http.get("/events?follow=false", headers=keys[name] | last)).text)

        assert await after(None, "ann") == [("begin", {"number": 0})]
        open_ = await running(plane.store, "default", "ann")
        second = await submit(plane.store, "default", "ann")
        await submit(plane.store, "other", "zoe")
        found = await after(0, "ann")
        assert [(kind, one["number"], one["job_id"], one["following"]) for kind, one in found] == [
            ("state", 1, open_.job_id, "queued"),
            ("state", 2, open_.job_id, "starting"),
            ("state", 3, open_.job_id, "running"),
            ("state", 4, second.job_id, "queued"),
        ]
        assert (found[0][1]["previous"], found[1][1]["previous"]) == (None, "queued")
        assert [one["number"] for _, one in await after(0, "eve")] == [1, 2, 3, 4]
        assert [one["number"] for _, one in await after(2, "ann")] == [3, 4]
        assert await after(4, "ann") == []
        assert await after(None, "ann") == [("begin", {"number": 4})]
        assert len(await after(0, "stranger")) == 1
        for wrong in ("", "x", "-1", "1.2", "9" * 30):
            answer = await http.get("/events?follow=false", headers=keys["ann"] | {"last-event-id": wrong})
            assert answer.status_code in (400, 422), wrong


@pytest.mark.slow
async def test_the_stream_of_a_tenant_ends_with_its_key(plane, keys, monkeypatch):
    monkeypatch.setattr(sse, "POLL_SECONDS", 0.02)
    async with client(plane) as http:
        following = asyncio.ensure_future(http.get("/events", headers=keys["bob"]))
        await asyncio.sleep(0.2)
        assert not following.done()
        await http.delete("/users/bob", headers=keys["admin"])
        async with asyncio.timeout(20):
            assert events_of((await following).text) == [("begin", {"number": 0})]


@pytest.mark.slow
async def test_waiting_jobs_have_their_places_and_machines_what_is_free(plane, keys):
    scheduler, node = plane.scheduler, Node(node_id="n", cpus=4.0, gpus=1, memory_gib=8.0)
    low = await submit(plane.store, "default", "ann", priority="low", resources=Resources(cpus=2.0))
    high = await submit(plane.store, "default", "ann", priority="high", resources=Resources(cpus=2.0))
    scheduler.nodes = [node]
    held = RunningJob(
        job_id="job-held",
        tenant="other",
        submitted_at=0.0,
        needs=Resources(cpus=3.5, gpus=1.0, memory_gib=5.0),
        node_id="n",
        devices=((0, 1),),
        since=0.0,
    )
    scheduler.running["job-held"] = held
    await scheduler._place()
    cards = (GpuUse(index=0, utilisation=0.5), GpuUse(index=1, problem="lost"))
    scheduler._launcher.cards = {"n": GpuReading(cards), "gone": GpuReading((), "no driver")}
    async with client(plane) as http:
        jobs = (await http.get("/jobs", headers=keys["eve"])).json()["jobs"]
        assert {job["job_id"]: job["place"] for job in jobs} == {high.job_id: 1, low.job_id: 2}
        assert all("waits for" in job["reason"] or "behind" in job["reason"] for job in jobs)
        (view,) = (await http.get("/cluster", headers=keys["eve"])).json()["nodes"]
        assert (view["free_cpus"], view["free_gpus"], view["free_memory_gib"], view["jobs"]) == (0.5, 0.0, 3.0, 1)
        assert [(card["utilisation"], card["problem"]) for card in view["gpu_use"]] == [(0.5, ""), (None, "lost")]
        scheduler._launcher.cards = {"n": GpuReading((), "no driver")}
        (view,) = (await http.get("/cluster", headers=keys["eve"])).json()["nodes"]
        assert (view["gpu_use"], view["gpu_problem"]) == ([], "no driver")
        await plane.store.change_state(high.job_id, JobState.QUEUED, JobState.STARTING, "there is room")
        assert (await http.get(f"/jobs/{high.job_id}", headers=keys["eve"])).json()["place"] is None


async def test_a_key_says_its_role_and_whether_it_runs_the_cluster(plane, keys):
    async with client(plane) as http:
        for name, role, operator in (("admin", "admin", True), ("ann", "member", False), ("stranger", "admin", False)):
            me = (await http.get("/me", headers=keys[name])).json()
            assert (me["role"], me["operator"]) == (role, operator)


async def test_a_log_is_read_from_near_its_end_and_says_from_where(plane, keys):
    job = await submit(plane.store, "default", "ann")
    folder = plane.scheduler.folder_of(job.job_id)
    async with client(plane) as http:

        async def read(query: str) -> tuple[str, str]:
            answer = await http.get(f"/jobs/{job.job_id}/logs{query}", headers=keys["eve"])
            return answer.headers["log-offset"], answer.text

        assert await read("?last=5") == ("0", "")
        folder.mkdir(parents=True)
        (folder / "log.txt").write_text("0123456789")
        assert await read("") == ("0", "0123456789")
        assert await read("?offset=7") == ("7", "789")
        assert await read("?last=4") == ("6", "6789")
        assert await read("?last=4&offset=8") == ("8", "89")
        assert await read("?last=100") == ("0", "0123456789")


async def test_a_user_has_so_many_streams_and_others_theirs(plane, keys, monkeypatch):
    opened = []  # by the application, which is made with its client
    monkeypatch.setattr(jobs_api, "MOST_STREAMS", 3)
    monkeypatch.setattr(jobs_api, "OpenStreams", lambda *given: opened.append(OpenStreams(*given)) or opened[-1])
    job = await with_run(plane)
    paths = ["/events", f"/jobs/{job}/events", f"/jobs/{job}/logs?follow=true"]
    async with client(plane) as http:
        following = [asyncio.ensure_future(http.get(path, headers=keys["eve"])) for path in paths]
        while opened[0].open.total() < len(paths):
            await asyncio.sleep(0.01)
        for path in paths:
            answer = await http.get(path, headers=keys["eve"])
            assert (answer.status_code, "3 streams" in answer.json()["error"]["message"]) == (429, True)
        assert (await http.get("/events?follow=false", headers=keys["ann"])).status_code == 200
        await plane.store.request_cancel("default", job, "enough")  # two of the streams end
        await asyncio.wait(following[1:], timeout=5.0)
        assert (await http.get("/events?follow=false", headers=keys["eve"])).status_code == 200
        following[0].cancel()
        await asyncio.gather(*following, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.timeout(30)
async def test_a_damaged_run_holds_up_no_one(plane, keys, monkeypatch):
    monkeypatch.setattr(streams, "READ_SECONDS", 0.5)
    endless, pipe, good = await with_run(plane), await with_run(plane), await with_run(plane)
    store = plane.scheduler.folder_of(endless) / RUN / "run.db"
    with contextlib.closing(sqlite3.connect(store)) as connection:
        connection.execute("ALTER TABLE events RENAME TO former")
        connection.execute(
            "CREATE VIEW events AS WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more) "
            "SELECT n AS event_id, 0.0 AS at, 'step' AS kind, '{}' AS data FROM more WHERE n < 0"
        )
        connection.commit()
    other = plane.scheduler.folder_of(pipe) / RUN / "run.db"
    other.unlink()
    os.mkfifo(other)
    async with client(plane) as http:

        async def read(job):
            return (await http.get(f"/jobs/{job}/events?follow=false", headers=keys["ann"])).text

        blocked = [asyncio.ensure_future(read(job)) for job in [endless] * 40 + [pipe]]
        assert "event: completed" in await read(good)
        assert all("event: state" in text and "completed" not in text for text in await asyncio.gather(*blocked))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"config_toml": "steps = "}, "not valid TOML"),
        ({"config_toml": "x = " + "[" * 5000}, "nested too deeply"),
        ({"config_toml": "steps = 3", "config": {}}, "leave one of them out"),
        ({"config_toml": "nothing = 1"}, "nothing"),
        ({"config_toml": "[tasks]\ntrain = '/etc/passwd'"}, "does not read"),
        ({"config_toml": "#" * 2**18 + "#"}, "config_toml"),
        ({"config_toml": "seed = nan"}, "seed"),
        ({"config_toml": "name = 2026-01-01"}, "name"),
        ({"config_toml": "a." * 130_000 + "a = 1"}, "50 parts"),  # would take 70 GB
        ({"config_toml": "x = {" + "'a' . " * 40_000 + "a = 1}"}, "50 parts"),
        ({"config_toml": "[" + '"\\"".' * 40_000 + "a]"}, "50 parts"),
        ({"config_toml": 'name = "' + '\\" ' * 80_000 + '"'}, "a name has"),  # is searched in linear time
        ({"config_toml": "".join(f"[a{i}]\n" for i in range(30_000))}, "unknown key 'a0'"),  # all would take a minute
        ({"config": {f"a{i}": 1 for i in range(40_000)}}, "unknown key 'a0'"),
        ({"config_toml": "steps = " + "1" * 5000}, "digits"),
        ({"config_toml": "kind = 0x" + "1" * 5000}, "64-bit"),
        ({"config_toml": "x = " + "[" * 300 + "]" * 300}, "config_toml"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.timeout(30)
async def test_a_configuration_in_toml_that_is_no_job_is_refused_in_words(plane, keys, body, said):
    async with client(plane) as http:
        answer = await http.post("/jobs", json=body, headers=keys["ann"])
        assert answer.status_code in (400, 422), answer.text
        assert said in answer.json()["error"]["message"]


@pytest.mark.slow
async def test_a_configuration_in_toml_is_the_same_job_as_in_json(plane, keys):
    config = {"name": "typed", "steps": 3, "engine": {"kind": "fake"}}
    text = 'name = "typed"\nsteps = 3\n[engine]\nkind = "fake"\n'
    async with client(plane) as http:
        made = [
            (await http.post("/jobs", json=body, headers=keys["ann"])).json()
            for body in ({"config": config, "name": "typed"}, {"config_toml": text})
        ]
        given = (await http.post("/jobs", json={"config_toml": text, "name": "mine"}, headers=keys["ann"])).json()
    assert made[0]["config"] == made[1]["config"]
    assert made[0]["config"].items() > config.items()
    assert [job["name"] for job in (*made, given)] == ["typed", "typed", "mine"]


async def test_runs_that_were_added_longest_ago_are_forgotten_with_all_that_is_kept_of_them(tmp_path):
    base = await record(tmp_path)
    reader = Reader((), asyncio.Event(), 2)
    for name in "abc":
        reader.add(Run(name=name, folder=base.folder))
        await reader.described(reader.run(name))
    assert list(reader.runs) == ["b", "c"]
    assert reader._slots.keys() == {"b", "c"}
    reader.add(reader.runs["b"])
    reader.add(Run(name="d", folder=base.folder))
    assert list(reader.runs) == ["b", "d"]
    with pytest.raises(NotFound) as missing:
        reader.run("a")
    assert "'b'" not in str(missing.value)
    assert "there are" not in str(missing.value)


@pytest.mark.slow
async def test_one_tenants_streams_take_no_place_of_anothers_and_leave_nothing(plane, keys, monkeypatch, tmp_path):
    monkeypatch.setattr(run_streams, "MOST_STREAMS", 1)
    monkeypatch.setattr(run_streams, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(Run, "in_use", lambda _: True)
    job = await with_run(plane)
    theirs = await submit(plane.store, "other", "zoe")
    shutil.copytree(plane.scheduler.folder_of(job), plane.scheduler.folder_of(theirs.job_id))
    made = []
    monkeypatch.setattr(service_page, "Streams", lambda *given: made.append(run_streams.Streams(*given)) or made[-1])
    async with client(plane) as http:
        following = asyncio.ensure_future(http.get(f"/dashboard/api/events?after={job}:0", headers=keys["ann"]))
        await asyncio.sleep(0.2)
        more = await http.get(f"/dashboard/api/events?after={job}:0&follow=false", headers=keys["eve"])
        assert more.status_code == 429
        path = f"/dashboard/api/events?after={theirs.job_id}:0&follow=false"
        assert (await http.get(path, headers=keys["stranger"])).status_code == 200
        await http.delete("/users/ann", headers=keys["admin"])
        async with asyncio.timeout(20):
            await following
    (streams,) = made
    gc.collect()
    assert (dict(streams._feeds), dict(streams._open.open)) == ({}, {})
