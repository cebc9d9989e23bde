"""SIGTERM ends every process that plays environments within ten seconds, whatever a model does in a terminal."""

from __future__ import annotations

import asyncio
import signal
import time

import psutil
import pytest
from env_servers import KEY
from floods import FLOODS, TASK
from machine import require
from servers import HERE, PALESTRA, SCRIPTED, Job, Process, free_port, until

from palestra.types.messages import text_message
from palestra_remote import RemoteEnvironment

pytestmark = pytest.mark.ci

require("bwrap", "git")
FILE = HERE / "floods.py"
SECONDS = 10.0  # from SIGTERM to the end
JOB = SCRIPTED | {"evaluation": {"every_steps": 0}}
FLOOD = "long lines again and again"


def floods(process: Process) -> bool:
    below = psutil.Process(process.popen.pid).children(recursive=True)
    return any(child.name() == "bash" for child in below)


def ended(process: Process) -> int:
    """Send SIGTERM and return the exit code; nothing that the process has started is left."""
    children = psutil.Process(process.popen.pid).children(recursive=True)
    began = time.monotonic()
    process.send(signal.SIGTERM)
    code = process.wait(2 * SECONDS)
    assert time.monotonic() - began < SECONDS, process.output
    assert not psutil.wait_procs(children, timeout=5)[1]
    return code


async def serves(played: str, folder, check) -> None:
    """Serve an environment, act in it once, and look what becomes of the server."""
    port = free_port()
    server = Process.start([PALESTRA, "env", "serve", f"{FILE}:{played}", "--port", port], folder / "server.log")
    environment = RemoteEnvironment(f"http://127.0.0.1:{port}", KEY, retry_seconds=0.2)
    try:
        until(lambda: "whose page" in server.output, "the server listens")
        await environment.setup()
        await environment.reset({})
        environment.act((await environment.observe()).id, text_message("assistant", ""))
        await asyncio.sleep(1.0)
        check(server)
    finally:
        server.kill()
        await environment.close()


@pytest.mark.parametrize(
    "name", [name if name == FLOOD else pytest.param(name, marks=pytest.mark.slow) for name in FLOODS]
)
async def test_an_environment_server_ends(tmp_path, name, monkeypatch):
    monkeypatch.setenv("PALESTRA_ENVIRONMENT_KEY", KEY)
    monkeypatch.setenv("FLOOD", FLOODS[name])

    def check(server: Process) -> None:
        assert floods(server)
        assert ended(server) == 0

    await serves("Flooded", tmp_path, check)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Waits", "Clings"])
async def test_a_server_ends_although_its_environment_does_not(tmp_path, name, monkeypatch):
    monkeypatch.setenv("PALESTRA_ENVIRONMENT_KEY", KEY)

    def check(server: Process) -> None:
        assert ended(server) == 1
        assert "left behind" in server.output

    await serves(name, tmp_path, check)


@pytest.mark.slow
@pytest.mark.parametrize("runners", [None, 1])
def test_a_job_that_plays_ends(tmp_path, runners):
    tasks = [{**TASK, "id": f"t{number}", "begin": FLOODS[FLOOD]} for number in range(4)]
    settings = JOB | {"environment": {"name": "terminal", **({} if runners is None else {"runners": runners})}}
    with Job(tmp_path / "job", settings, tasks=tasks, validation=(), fresh=True) as job:
        server = job.start()
        until(lambda: floods(server), "a command runs")
        assert ended(server) == 130


@pytest.mark.slow
def test_a_worker_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOOD", FLOODS[FLOOD])
    with Job(tmp_path / "job", JOB, fresh=True) as job:
        server = job.start()
        worker = Process.start([PALESTRA, "worker", f"{FILE}:Flooded", "--url", job.url], tmp_path / "worker.log")
        try:
            until(lambda: floods(worker), "a command runs")
            assert ended(worker) in (0, 1)
        finally:
            worker.kill()
        assert ended(server) == 130
