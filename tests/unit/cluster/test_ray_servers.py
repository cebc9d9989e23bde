"""What a start that is broken off leaves in the cluster; Ray itself is slow here, and makes nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from palestra.cluster import ray_servers
from palestra.cluster.ray_servers import RayServers
from palestra.scheduler.launcher import ServerOrder
from palestra.schemas.jobs import Resources

ORDER = ServerOrder(job_id="job", config={}, folder=Path("job"), node="n", resources=Resources(cpus=1.0))


@pytest.mark.parametrize("step", ["group", "actor"])
async def test_what_is_being_made_when_a_start_is_broken_off_is_cleared_up_after_it_is_there(monkeypatch, step):
    begun, go, happened = threading.Event(), threading.Event(), []

    def slow(*_, **__) -> None:
        begun.set()
        assert go.wait(60)
        happened.append("made")

    class Remote:
        def options(self, **_):
            return self

        remote = staticmethod(slow)

    async def clear(self, job_id: str) -> None:
        happened.append("cleared")

    async def ready(group, node_id: str) -> None: ...

    monkeypatch.setattr(ray_servers, "placement_group", slow if step == "group" else lambda *_, **__: None)
    monkeypatch.setattr(ray_servers, "PlacementGroupSchedulingStrategy", lambda *_: None)
    monkeypatch.setattr(ray_servers.ray, "remote", lambda _: Remote())
    monkeypatch.setattr(ray_servers, "_until_ready", ready)
    monkeypatch.setattr(RayServers, "_clear", clear)
    starting = asyncio.ensure_future(RayServers().start(ORDER))
    assert await asyncio.to_thread(begun.wait, 60)
    starting.cancel()
    await asyncio.sleep(0.05)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert happened == ["made", "cleared"]


async def test_every_answer_to_a_ping_is_heard_until_the_server_is_silent():
    answers, heard = [12.5, ray_servers.ray.exceptions.RayError("away"), None, 7.0], []

    async def ping() -> float | None:
        if not answers:
            await asyncio.Event().wait()
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    await ray_servers._until_silent(ping, 0.01, 0.03, heard.append)
    assert heard == [12.5, None, 7.0]


@pytest.mark.parametrize(
    ("answers", "grace", "ended", "said"),
    [
        (True, 60.0, True, None),
        (True, 0.05, False, "it took over 0.05 s to end"),
        (False, 60.0, False, "it did not answer for 0.05 s"),
    ],
)
async def test_why_a_job_that_is_to_end_is_not_waited_for_any_longer(monkeypatch, answers, grace, ended, said):
    class Method:
        def __init__(self, returns: bool) -> None:
            self.returns = returns

        async def remote(self) -> None:
            if not self.returns:
                await asyncio.Event().wait()

    actor = SimpleNamespace(stop=Method(answers), ended=Method(ended), answer=Method(answers))
    monkeypatch.setattr(ray_servers, "STUCK_SECONDS", 0.05)
    async with asyncio.timeout(30):
        assert await ray_servers._stopped(actor, grace) == said
