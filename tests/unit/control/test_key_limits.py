"""Limits of a key as an admin sets them, and what they do to what is submitted with it."""

from __future__ import annotations

import orjson
import pytest
import sqlalchemy as sa

from palestra_control.wire import LimitsBody, LimitsView
from palestra_service.rights import KeyLimits
from palestra_service.store.tables import keys


def by(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def key(http, **limits) -> dict[str, str]:
    """The headers of one that has these."""
    answer = await http.post("/keys", json={"limits": limits})
    assert answer.status_code == 201, answer.text
    return by(answer.json()["secret"])


def test_the_wire_names_every_limit():
    assert set(LimitsBody.model_fields) == set(LimitsView.model_fields) == set(KeyLimits.__slots__)


async def test_what_is_set_is_shown_and_the_rest_is_as_before(http):
    made = (await http.post("/keys", json={"label": "ci", "limits": {"open_jobs": 5, "burst": 7}})).json()
    shown = {found["label"]: found["limits"] for found in (await http.get("/keys")).json()}
    assert shown["ci"] == made["limits"] == shown["first start"] | {"open_jobs": 5, "burst": 7}
    again = (await http.post("/keys", json={"limits": {"burst": 9}}, headers=by(made["secret"]))).json()
    assert again["limits"] == made["limits"] | {"burst": 9}


async def test_only_an_admin_sets_them(http):
    bob = by((await http.post("/users", json={"name": "bob"})).json()["secret"])
    assert (await http.post("/keys", json={"limits": {"burst": 1}}, headers=bob)).status_code == 403
    made = await http.post("/keys", json={"user": "bob", "limits": {"open_jobs": 1}})
    weaker = by(made.json()["secret"])
    assert [(await http.post("/jobs", json={"config": {}}, headers=weaker)).status_code for _ in "12"] == [201, 429]
    grown = await http.post("/keys", json={}, headers=weaker)  # a key never makes a stronger one
    assert grown.json()["limits"]["open_jobs"] == 1


@pytest.mark.parametrize(
    "limits", [{"burst": 0}, {"burst": 1.5}, {"open_jobs": -1}, {"requests_per_minute": 0.5}, {"bursts": 1}, 5]
)
async def test_what_is_no_limit_is_refused(http, limits):
    assert (await http.post("/keys", json={"limits": limits})).status_code == 422


async def test_requests_and_bodies_are_limited_as_it_says(http, plane):
    slow = await key(http, requests_per_minute=60, burst=2)
    assert [(await http.get("/me", headers=slow)).status_code for _ in range(3)] == [200, 200, 429]
    plane.store.clock.advance(1)
    assert (await http.get("/me", headers=slow)).status_code == 200
    small = await key(http, body_bytes=100)
    body = {"config": {}, "name": "x" * 100}
    assert (await http.post("/jobs", json=body, headers=small)).status_code == 413

    async def in_pieces():
        yield orjson.dumps(body)

    unsaid = await http.post("/jobs", content=in_pieces(), headers=small | {"content-type": "application/json"})
    assert "content-length" not in unsaid.request.headers
    assert unsaid.status_code == 413


@pytest.mark.slow
@pytest.mark.parametrize(("given", "kept"), [(None, 20), (5, 5), (20, 20), (1000, 20)])
async def test_a_job_gets_no_more_episodes_in_flight_than_the_key_allows(http, given, kept):
    headers = await key(http, episodes_in_flight=20)
    rollout = {"group_size": 4} | ({} if given is None else {"max_claimed": given})
    job = (await http.post("/jobs", json={"config": {"rollout": rollout}}, headers=headers)).json()
    assert job["config"] == {"rollout": {"group_size": 4, "max_claimed": kept}}


async def test_a_job_that_is_submitted_again_by_a_weaker_key_is_limited_too(http):
    job = (await http.post("/jobs", json={"config": {}})).json()
    assert job["config"]["rollout"]["max_claimed"] == KeyLimits().episodes_in_flight
    again = await http.post(f"/jobs/{job['job_id']}/resubmit", headers=await key(http, episodes_in_flight=3))
    assert again.json()["config"]["rollout"]["max_claimed"] == 3


async def test_a_key_that_was_stored_before_there_was_a_limit_has_its_default(plane, http):
    def older(connection):
        for row in connection.execute(sa.select(keys)).all():
            limits = {name: n for name, n in orjson.loads(row.limits).items() if name != "episodes_in_flight"}
            connection.execute(keys.update().values(limits=orjson.dumps(limits).decode()))

    await plane.store.write(older)
    assert (await http.get("/keys")).json()[0]["limits"]["episodes_in_flight"] == KeyLimits().episodes_in_flight
