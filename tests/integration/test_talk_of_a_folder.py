"""Talking to a checkpoint from the page of a folder: the process that serves it, its ends, and who may start it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import psutil
import pytest
from servers import SCRIPTED, Job, run_through

from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.runs import runs_of
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.http.server import listen, served, url_of
from palestra_inspect import checkpoint_server, folder_page
from palestra_inspect.checkpoint_server import CheckpointServer
from palestra_inspect.folder_page import create_folder_app, playground_state

pytestmark = pytest.mark.slow
TALK = "/dashboard/api/runs/run/talk"
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "2 + 2 ="}], "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of a real server and a real worker, with two checkpoints."""
    settings = SCRIPTED | {"steps": 2, "checkpoint": {"every_steps": 1, "keep": 2}}
    with Job(tmp_path_factory.mktemp("talk"), settings) as job:
        run_through(job, [])
        yield job.run_dir


class Page:
    """`palestra dashboard` in this process."""

    def __init__(self, http: httpx2.AsyncClient, server: CheckpointServer) -> None:
        self.http, self.server = http, server

    async def state(self) -> dict:
        return (await self.http.get(TALK)).raise_for_status().json()

    async def load(self, name: str) -> dict:
        return (await self.http.post(f"{TALK}/load", json={"checkpoint": name})).raise_for_status().json()

    async def until(self, state: str) -> dict:
        async with asyncio.timeout(60):
            while (found := await self.state())["state"] != state:
                await asyncio.sleep(0.1)
        return found

    async def ask(self, **more) -> httpx2.Response:
        return await self.http.post(f"{TALK}/chat/completions", json=ASKED | more)

    def children(self) -> list[psutil.Process]:
        mine = psutil.Process().children(recursive=True)
        return [one for one in mine if "palestra_inspect.checkpoint_server" in " ".join(one.cmdline())]


@pytest.fixture
async def page(folder):
    access, stopping, server = OneTimeLink(), asyncio.Event(), CheckpointServer()
    listener = listen("127.0.0.1", 0)
    app = create_folder_app(runs_of([folder]), access, stopping, server, "127.0.0.1")
    async with served(app, listener, stopping.set), httpx2.AsyncClient(base_url=url_of(listener), timeout=60) as http:
        code = {"authorization": f"Bearer {access.code}"}
        http.headers["authorization"] = f"Bearer {(await http.post('/dashboard/session', headers=code)).json()['key']}"
        page = Page(http, server)
        yield page
        await server.end()
        assert page.children() == []


async def test_a_checkpoint_is_loaded_answers_and_leaves_nothing(page, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert await page.state() == {
        "able": True,
        "why": "",
        "checkpoints": ["policy@step-2", "policy@step-1"],
        "state": "none",
        "checkpoint": "",
        "phase": "",
        "reason": "",
        "seconds": 0.0,
        "policies": [],
    }
    assert (await page.ask()).status_code == 409
    begun = await page.load("policy@step-1")
    assert (begun["state"], begun["checkpoint"]) == ("loading", "policy@step-1")
    ready = await page.until("ready")
    assert ready["policies"] == ["policy"]
    answer = await page.ask()
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"
    streamed = await page.ask(stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert (await page.ask(messages=[])).status_code == 422, "its refusals are passed on"
    (child,) = page.children()
    assert child.nice() >= 10
    again = await page.load("policy@step-1")
    assert (again["state"], page.children()) == ("ready", [child])
    await page.load("policy@step-2")
    await page.until("ready")
    assert not child.is_running(), "one at a time"
    assert len(page.children()) == 1
    ended = (await page.http.post(f"{TALK}/end")).json()
    assert (ended["state"], ended["reason"], page.children()) == ("ended", "", [])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


async def test_one_that_is_killed_damaged_or_unknown_says_why(page, folder):
    await page.load("policy@step-2")
    await page.until("ready")
    os.kill(page.children()[0].pid, signal.SIGKILL)
    assert (await page.until("ended"))["reason"].startswith("its process was killed by SIGKILL")
    assert (await page.ask()).status_code == 409
    unknown = await page.http.post(f"{TALK}/load", json={"checkpoint": "policy@step-9"})
    assert unknown.status_code == 422
    (weights,) = folder.glob("checkpoints/step-000001/weights*")
    content = weights.read_bytes()
    try:
        weights.write_bytes(content + b"x")
        await page.load("policy@step-1")
        assert "is damaged" in (await page.until("ended"))["reason"]
    finally:
        weights.write_bytes(content)


async def test_one_without_calls_or_with_too_much_memory_is_ended(page, monkeypatch):
    monkeypatch.setattr(checkpoint_server, "IDLE_SECONDS", 0.5)
    await page.load("policy@step-2")
    assert (await page.until("ended"))["reason"] == checkpoint_server.IDLE
    monkeypatch.setattr(checkpoint_server, "_memory_limit", lambda: 2.0**20)
    await page.load("policy@step-2")
    assert (await page.until("ended"))["reason"].startswith("out of memory: it took 0.")


async def test_only_the_user_of_the_link_on_this_machine_may_load(page, folder, monkeypatch):
    routes = [("GET", TALK), *(("POST", f"{TALK}/{name}") for name in ("load", "end", "chat/completions"))]
    for method, path in routes:
        for headers in ({"authorization": ""}, {"authorization": "Bearer pv-no"}):
            assert (await page.http.request(method, path, headers=headers, json={})).status_code == 401
        other = path.replace("/run/", "/other/")
        assert (await page.http.request(method, other, json={"checkpoint": "c"})).status_code == 404
    (run,) = runs_of([folder])
    assert "listens on 0.0.0.0" in playground_state(run, None, "0.0.0.0").why
    real = run.config.model_copy(update={"engine": EmbeddedEngineConfig()})
    monkeypatch.setattr(folder_page, "find_spec", lambda name: None)
    assert "palestra[train]" in folder_page._why_not(real, ["policy@step-1"], "127.0.0.1")
    assert folder_page._why_not(run.config, ["policy@step-1"], "127.0.0.1") == "", "the fake engine needs no torch"
    assert "no checkpoint yet" in folder_page._why_not(run.config, [], "127.0.0.1")


def test_it_ends_with_the_dashboard_also_if_that_is_killed(folder):
    script = f"""
import asyncio, sys
from pathlib import Path
from palestra_inspect.checkpoint_server import CheckpointServer

async def main():
    server = CheckpointServer()
    served = await server.load("run", Path({str(folder)!r}), "policy@step-2")
    while served.state == "loading":
        await asyncio.sleep(0.05)
    print(served.state, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    dashboard = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert dashboard.stdout is not None
    assert dashboard.stdout.readline() == "ready\n"
    (child,) = psutil.Process(dashboard.pid).children()
    dashboard.kill()
    dashboard.wait()
    dashboard.stdout.close()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()
