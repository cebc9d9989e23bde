"""A job whose engine is gone ends with the reason; it would wait for episodes for ever."""

from __future__ import annotations

import asyncio

import pytest

from palestra.config import JobConfig
from palestra.engine.fake import FakeEngine
from palestra.errors import EngineFailure
from palestra.runtime.local import local_job
from palestra.types.states import JobState
from palestra_service.jobs.launcher import Ended, Ending
from palestra_service.model_server import ModelServer

TRAINING = {
    "steps": 1,
    "engine": {"kind": "fake"},
    "rollout": {"group_size": 2, "groups_per_step": 1},
}
SERVING = {"kind": "inference", "engine": {"kind": "fake"}}


@pytest.fixture
def broken(monkeypatch):
    """Set, and every engine is broken."""
    event = asyncio.Event()

    async def failure(self) -> str:
        await event.wait()
        return "the engine failed: no memory"

    monkeypatch.setattr(FakeEngine, "failure", failure)
    return event


@pytest.mark.parametrize("settings", [TRAINING, SERVING])
async def test_a_job_fails_with_its_engine(broken, tmp_path, settings):
    config = JobConfig.model_validate(settings | {"run_dir": tmp_path, "server": {"port": 0}})
    async with local_job(config, lambda kind, data: None) as job, asyncio.timeout(60):
        running = asyncio.ensure_future(job.run())
        while job.progress.state is not JobState.RUNNING:
            await asyncio.sleep(0.01)
        broken.set()
        with pytest.raises(EngineFailure, match="no memory"):
            await running
        assert (job.progress.state, job.progress.reason) == (JobState.FAILED, "the engine failed: no memory")


async def test_a_server_whose_engine_failed_may_be_started_again(monkeypatch, tmp_path):
    monkeypatch.setattr("palestra_service.model_server.logging.basicConfig", lambda **_: None)

    async def failure(self) -> str:
        return "the engine failed: no memory"

    monkeypatch.setattr(FakeEngine, "failure", failure)
    server = ModelServer()
    await server.start(SERVING, str(tmp_path), "127.0.0.1")
    assert await server.ended() == Ended(ending=Ending.LOST, reason="the engine failed: no memory")
    server._log.close()
