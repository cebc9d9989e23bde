"""How a start that is broken off waits for what is being made, and how silence is noticed; no Ray is started.

That nothing of such a start is left in a cluster is tested in `test_ray_cluster.py`, on a real one.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from palestra_service.ray import servers


async def test_what_is_being_made_is_there_before_the_one_who_asked_for_it_is_cancelled():
    """Otherwise it would come into being after everything was cleared up."""
    begun, go, made = threading.Event(), threading.Event(), []

    def slow(what: str) -> None:
        begun.set()
        assert go.wait(60)
        made.append(what)

    making = asyncio.ensure_future(servers._made(slow, "group"))
    assert await asyncio.to_thread(begun.wait, 60)
    making.cancel()
    await asyncio.wait({making}, timeout=0.05)
    assert not making.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert made == ["group"]


async def test_every_answer_to_a_ping_is_heard_until_the_server_is_silent():
    answers, heard = [12.5, servers.ray.exceptions.RayError("away"), None, 7.0], []

    async def ping() -> float | None:
        if not answers:
            await asyncio.Event().wait()
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    await servers._until_silent(ping, 0.01, 0.03, heard.append)
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
    monkeypatch.setattr(servers, "STUCK_SECONDS", 0.05)
    async with asyncio.timeout(30):
        assert await servers._stopped(actor, grace) == said


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("listens", None),
        (servers.PalestraError("no such model"), "such model"),
        (None, r"0.03"),
    ],
    ids=["listens", "raises", "silent"],
)
async def test_a_start_is_waited_for_as_long_as_its_process_answers(monkeypatch, start, said):
    monkeypatch.setattr(servers, "PING_SECONDS", 0.01)
    monkeypatch.setattr(servers, "PING_LIMIT_SECONDS", 0.03)
    pings, ended = [], []

    async def begin(order, host) -> object:
        try:
            await asyncio.sleep(60 if start is None else 0.2)
        finally:
            ended.append(start)
        if isinstance(start, Exception):
            raise start
        return start

    async def ping() -> None:
        pings.append(1)
        if start is None and len(pings) > 3:
            await asyncio.Event().wait()

    actor = SimpleNamespace(start=SimpleNamespace(remote=begin), ping=SimpleNamespace(remote=ping))
    before = asyncio.all_tasks()
    async with asyncio.timeout(30):
        if said is None:
            assert await servers._listening(actor, None, None) == "listens"
        else:
            with pytest.raises(servers.PalestraError, match=said):
                await servers._listening(actor, None, None)
    assert ended == [start]
    assert len(pings) > 3
    for _ in range(3):  # a ping whose answer is not awaited any more ends in the next turns of the event loop
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
