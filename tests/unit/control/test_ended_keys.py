"""A key that was revoked sees nothing more, also of what it has open."""

from __future__ import annotations

import asyncio

import pytest

from palestra.http import sse
from palestra_service.api import streams
from palestra_service.rights import Role
from unit.control.building import running


@pytest.fixture
async def admin(plane):
    return await plane.identities.authenticate((await plane.administration.first_start()).secret)


@pytest.fixture
async def eve(plane, admin):
    return await plane.administration.add_user(admin, "eve", Role.MEMBER)


async def revoked(plane, admin, key) -> None:
    await plane.administration.revoke_key(admin, key.record.key_id)


async def removed(plane, admin, key) -> None:
    await plane.administration.remove_user(admin, key.record.user)


async def expired(plane, admin, key) -> None:
    plane.store.clock.advance(3600)


@pytest.mark.parametrize("end", [revoked, removed, expired])
@pytest.mark.parametrize("kind", ["events", "log"])
async def test_what_a_key_has_open_ends_with_it(plane, admin, eve, tmp_path, monkeypatch, kind, end):
    monkeypatch.setattr(sse, "POLL_SECONDS", 0.05)
    key = await plane.administration.create_key(admin, user="eve", lifetime_seconds=3600.0)
    by = await plane.identities.authenticate(key.secret)
    job = await running(plane.store, "default", "admin")
    if kind == "events":
        stream = streams.events(plane, by, job.job_id, tmp_path, streams.StreamPlace(), wait=True)
    else:
        (tmp_path / "log").write_text("it starts\n")
        stream = streams.log(plane, by, job.job_id, tmp_path / "log", 0, wait=True)
    assert await anext(stream)
    rest = asyncio.ensure_future(_all(stream))
    await asyncio.sleep(3 * sse.POLL_SECONDS)
    assert not rest.done()  # the job goes on, and so does the stream
    await end(plane, admin, key)
    await asyncio.wait_for(rest, 30)


async def _all(stream) -> list[bytes]:
    return [piece async for piece in stream]
