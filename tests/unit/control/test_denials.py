"""What is denied is written down; and a key that was revoked sees nothing more, also of what it has open."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from palestra.control.api import create_control_app, streams
from palestra.control.rights.permissions import Role
from palestra.http import sse
from unit.control.building import running

NONE = "job-0000000000000000"


@pytest.fixture
async def admin(plane):
    return await plane.identities.authenticate((await plane.administration.first_start()).secret)


@pytest.fixture
async def viewer(plane, admin):
    return await plane.administration.add_user(admin, "eve", Role.VIEWER)


def client(plane, key) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(create_control_app(plane), raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key.secret}"}
    return httpx2.AsyncClient(transport=transport, base_url="http://control", headers=headers)


async def denied(plane) -> list[tuple[str, str, str]]:
    """By eve, the oldest first."""
    lines = [line for line in await plane.store.audit("default", limit=500) if line.who == "eve"]
    return [(line.what, line.target, line.outcome) for line in reversed(lines)]


async def test_changes_that_are_denied_are_in_the_audit_log_and_nothing_else_is(plane, viewer):
    async with client(plane, viewer) as http:
        assert (await http.post("/jobs", json={"config": {}})).status_code == 403
        assert (await http.delete(f"/jobs/{NONE}")).status_code == 403
        assert (await http.delete("/keys/000000000000")).status_code == 404
        assert (await http.get(f"/jobs/{NONE}")).status_code == 404
        assert (await http.get("/users")).status_code == 403
        assert (await http.post("/keys", json={"limits": 5})).status_code == 422
        assert (await http.post("/nothing")).status_code == 404
    assert await denied(plane) == [
        ("job.submit", "POST /jobs", "forbidden"),
        ("job.cancel", f"DELETE /jobs/{NONE}", "forbidden"),
        ("key.revoke", "DELETE /keys/000000000000", "not_found"),
    ]


async def test_a_key_in_a_path_is_not_written_down(plane, viewer):
    async with client(plane, viewer) as http:
        assert (await http.delete(f"/keys/{viewer.secret}")).status_code == 404
    ((_, target, _),) = await denied(plane)
    assert viewer.secret not in target
    assert viewer.record.key_id in target


async def test_many_denials_are_counted_in_few_lines(plane, viewer):
    async with client(plane, viewer) as http:
        for _ in range(100):
            assert (await http.delete(f"/jobs/{NONE}")).status_code == 403
        assert [outcome for _, _, outcome in await denied(plane)] == ["forbidden"] * 20
        plane.store.clock.advance(60)
        assert (await http.delete(f"/jobs/{NONE}")).status_code == 403
    assert (await denied(plane))[20:] == [("job.cancel", f"DELETE /jobs/{NONE}", "forbidden, and 80 denials before it")]


async def revoked(plane, admin, key) -> None:
    await plane.administration.revoke_key(admin, key.record.key_id)


async def removed(plane, admin, key) -> None:
    await plane.administration.remove_user(admin, key.record.user)


async def expired(plane, admin, key) -> None:
    plane.store.clock.advance(3600)


@pytest.mark.parametrize("end", [revoked, removed, expired])
@pytest.mark.parametrize("kind", ["events", "log"])
async def test_what_a_key_has_open_ends_with_it(plane, admin, viewer, tmp_path, monkeypatch, kind, end):
    monkeypatch.setattr(sse, "POLL_SECONDS", 0.05)
    key = await plane.administration.create_key(admin, user="eve", lifetime_seconds=3600.0)
    by = await plane.identities.authenticate(key.secret)
    job = await running(plane.store, "default", "admin")
    if kind == "events":
        stream = streams.events(plane, by, job.job_id, tmp_path, streams.Place(), wait=True)
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
