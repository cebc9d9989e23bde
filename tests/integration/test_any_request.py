"""Requests of every kind that the OpenAPI documents allow, and of kinds that they do not: no 5xx, no end of waiting."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from servers import KEY, Job, Plane
from unit.control.launching import FakeLauncher

from palestra_service.ray import serve

EXAMPLES = 12  # of each kind for each route
TIMEOUT_SECONDS = 60.0  # of one answer; a server that hangs gives none at all


class ControlThread:
    """What `palestra serve` runs, in a thread; its launcher starts nothing."""

    def __init__(self, folder: Path) -> None:
        self._options = serve.ServeOptions(state_dir=folder, port=0)
        self._ready, self._thread = threading.Event(), threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.url, self.key = "", ""

    async def _serve(self) -> None:
        made = []
        async with serve.control_plane(self._options, lambda key, _: made.append(key)) as serving:
            self.url, self.key = serving.url, made[0].secret
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> ControlThread:
        self._thread.start()
        assert self._ready.wait(TIMEOUT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def control_plane(tmp_path, monkeypatch) -> Iterator[ControlThread]:
    fake = types.ModuleType("palestra_service.ray.servers")
    fake.RayServers = lambda *_: FakeLauncher()
    monkeypatch.setitem(sys.modules, "palestra_service.ray.servers", fake)
    monkeypatch.setattr(serve, "connect", lambda *_: "fake")
    with ControlThread(tmp_path) as running:
        yield running


def play(url: str, key: Callable[[Case], str], known: Mapping[str, str]) -> set[str]:
    """Ask every route of a server, also with the values that are `known` to it; returns which were asked."""
    document = httpx2.get(f"{url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    asked = set()
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            asked.add(operation.label)
            for mode in GenerationMode:

                @settings(
                    max_examples=EXAMPLES,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
                def any_request(case: Case, real: bool) -> None:
                    if real:
                        case.path_parameters |= {name: known[name] for name in case.path_parameters if name in known}
                        if isinstance(case.body, dict):
                            case.body |= {name: known[name] for name in case.body if name in known}
                    if isinstance(case.body, dict) and isinstance(case.body.get("wait_seconds"), float):
                        case.body["wait_seconds"] = min(case.body["wait_seconds"], 0.05)
                    if case.path.endswith("/events"):  # else it would go on for ever, as it says
                        case.query["follow"] = "false"
                    headers = {"authorization": f"Bearer {key(case)}"}
                    answer = case.call(base_url=url, session=session, headers=headers, timeout=TIMEOUT_SECONDS)
                    assert answer.status_code < 500, (case.as_curl_command(), answer.text)

                # what takes nothing from its caller can't be asked wrongly
                with contextlib.suppress(*([Unsatisfiable] if mode is GenerationMode.NEGATIVE else [])):
                    any_request()
    return asked


@pytest.mark.slow
def test_the_control_plane_answers_whatever_is_asked(control_plane):
    url = control_plane.url
    with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {control_plane.key}"}) as http:
        limits = {"requests_per_minute": 1e9, "burst": 10**9, "open_jobs": 10**9}
        key = http.post("/keys", json={"limits": limits}).json()["secret"]
        other = http.post("/users", json={"name": "ann"}).json()
        http.post("/tenants", json={"name": "ann"})
        job: dict[str, Any] = http.post("/jobs", json={"config": {}}).json()
        http.delete(f"/jobs/{job['job_id']}")
        known = {
            "job_id": job["job_id"],
            "run": job["job_id"],
            "key_id": other["key_id"],
            "name": "ann",
            "from_job": job["job_id"],
        }
        asked = play(url, lambda _: key, known)
        of_page = {"GET /events", "POST /dashboard/session", "GET /dashboard/api/runs/{run}/metrics"}
        assert of_page | {"POST /jobs", "PATCH /tenants/{name}", "GET /jobs/{job_id}/events"} <= asked
        assert http.get("/healthz").status_code == 200
        assert http.get("/cluster").status_code == 200
        again = http.post("/jobs", json={"config": {}}, headers={"authorization": f"Bearer {key}"})
        assert again.status_code == 201, "it takes jobs as before"


@pytest.mark.slow
def test_the_data_plane_answers_whatever_is_asked(tmp_path):
    short = {"steps": 100, "engine": {"kind": "fake"}}
    with Job(tmp_path, short | {"evaluation": {"every_steps": 0}}) as job:
        job.start()
        with Plane(job.url) as plane:
            episode: dict[str, Any] = plane.claim()
            of_episode = ("/v1/", "/heartbeat_episode", "/end_episode", "/abort_episode")
            asked = play(
                job.url,
                lambda case: episode["api_key"] if case.path.startswith(of_episode) else KEY,
                {"model": "policy", "episode_id": episode["episode_id"]},
            )
            assert {"POST /v1/chat/completions", "POST /claim_episode", "POST /tasks", "GET /events"} <= asked
            assert plane.get(f"/events?follow=false&after={10**30}").status_code == 422
            last = {"last-event-id": "9" * 5000}
            assert plane.get("/events?follow=false", headers=last).status_code == 422
            assert plane.get("/status").json()["state"] == "running"
