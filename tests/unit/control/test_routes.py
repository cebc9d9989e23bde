"""Every route of the control plane has a rule, and keeps to it, for every role."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx2
import pytest
from fastapi.routing import APIRoute

from palestra.dashboard.files import public_paths
from palestra.errors import Unauthorized
from palestra.http.bodies import LONG_BODY
from palestra.server import KeyRing
from palestra.server.auth import JobKey
from palestra.store.key_files import SecretFile, write_private
from palestra_service import api as control
from palestra_service.api import jobs_api
from palestra_service.page import create_service_app
from palestra_service.rights import Role
from unit.control.building import api_routes, submit

pytestmark = pytest.mark.ci

BODIES = {
    ("POST", "/jobs"): {"config": {}},
    ("POST", "/tenants"): {"name": "new"},
    ("PATCH", "/tenants/{name}"): {"quota": {"gpus": 2}},
    ("POST", "/users"): {"name": "new"},
    ("PATCH", "/users/{name}"): {"role": "member"},
    ("POST", "/keys"): {},
    ("POST", "/cluster/drain"): {"on": False},
}


PUBLIC = {*control.PUBLIC, "/", *public_paths()}


def application(plane):
    """What `palestra serve` serves: the control plane and its page."""
    return create_service_app(plane, asyncio.Event())


def routes(app) -> list[tuple[str, APIRoute]]:
    return [(method, route) for route in api_routes(app) for method in sorted(route.methods)]


RULES = ("member", "admin", "operator")
# What is meant, written down a second time: the routes of admins and operators, and those to what is one's own.
OPERATORS = {"/tenants", "/tenants/{name}", "/tenants/{name}/keys", "/cluster/drain"}
ADMINS = {"/users", "/users/{name}", "/audit"}
OWNERS = {("DELETE", "/jobs/{job_id}"), ("POST", "/jobs/{job_id}/rotate-key")}


def rule_of(route: APIRoute) -> str:
    (rule,) = [d.call.__name__ for d in route.dependant.dependencies if d.call.__name__ in RULES]
    return rule


def client(plane) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(application(plane), raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://control")


async def test_every_route_but_the_public_ones_has_exactly_one_rule(plane):
    found = {}
    for method, route in routes(application(plane)):
        if route.path not in PUBLIC:
            found[method, route.path] = rule_of(route)
    assert ("GET", "/dashboard/api/runs/{run}/metrics") in found
    assert {path for (_, path), rule in found.items() if rule == "operator"} == OPERATORS
    assert {path for (_, path), rule in found.items() if rule == "admin"} == ADMINS
    assert all(path in found or (method, path) in found for method, path in BODIES)


async def test_without_a_key_nothing_but_the_public_routes_answers(plane):
    async with client(plane) as http:
        for method, route in routes(application(plane)):
            answer = await http.request(method, filled(route.path), json=BODIES.get((method, route.path)))
            assert answer.status_code in ((200, 307) if route.path in PUBLIC else (401,)), (method, route.path)
            wrong = {"authorization": "Bearer pk_000000000000_" + "x" * 43}
            answer = await http.request(method, filled(route.path), headers=wrong)
            assert answer.status_code in ((200, 307) if route.path in PUBLIC else (401,))


def filled(path: str, job_id: str = "job-0000000000000000") -> str:
    values = {"job_id": job_id, "run": job_id, "name": "somebody", "key_id": "000000000000"}
    parts = {"step": "1", "kind": "train", "group": "0", "episode": "train-000000-00", "row": "0", "call": "0"}
    parts |= {"digest": "0" * 64, "policy": "policy"}
    whole = path.replace("{path:path}", "x").format(**values, **parts)
    return f"{whole}?after={job_id}:0" if path == "/dashboard/api/events" else whole


def at_once(path: str) -> str:
    """The address of a route, of whose stream only what there is now is wanted."""
    streams = path.partition("?")[0].endswith("/events")
    return f"{path}{'&' if '?' in path else '?'}follow=false" if streams else path


def of_a_job(route: APIRoute) -> bool:
    return "{job_id}" in route.path or "{run}" in route.path or route.path == "/dashboard/api/events"


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("tenant", ["default", "other"])
async def test_each_role_may_do_what_the_table_says_and_nothing_else(plane, role, tenant):
    admin = (await plane.administration.first_start()).secret
    async with client(plane) as http:
        by_admin = {"authorization": f"Bearer {admin}"}
        if tenant == "other":
            made = await http.post("/tenants", json={"name": "other"}, headers=by_admin)
            by_admin = {"authorization": f"Bearer {made.json()['secret']}"}
        made = await http.post("/users", json={"name": "ann", "role": role.value}, headers=by_admin)
        mine = {"authorization": f"Bearer {made.json()['secret']}"}
        job = await submit(plane.store, tenant, "ann")
        for method, route in routes(application(plane)):
            if route.path in PUBLIC:
                continue
            admin = role is Role.ADMIN and (route.path not in OPERATORS or tenant == "default")
            allowed = admin or route.path not in OPERATORS | ADMINS
            path = at_once(filled(route.path, job.job_id))
            async with asyncio.timeout(10):
                answer = await http.request(method, path, json=BODIES.get((method, route.path)), headers=mine)
            assert (answer.status_code == 403) is (not allowed), (method, route.path, answer.text)
            assert answer.status_code < 500, (method, route.path, answer.text)


async def test_a_job_of_another_tenant_is_exactly_as_one_that_does_not_exist(plane):
    admin = (await plane.administration.first_start()).secret
    job = await submit(plane.store, "other", "ann")
    async with client(plane) as http:
        headers = {"authorization": f"Bearer {admin}"}
        for method, route in routes(application(plane)):
            if not of_a_job(route):
                continue
            texts = []
            for job_id in (job.job_id, "job-0000000000000000"):
                answer = await http.request(method, filled(route.path, job_id), headers=headers)
                assert answer.status_code == 404, (method, route.path)
                texts.append(answer.text.replace(job_id, ""))
            assert texts[0] == texts[1]


@pytest.mark.parametrize("role", list(Role))
async def test_what_a_colleague_may_do_with_a_job_on_every_route(plane, role):
    """The matrix: each route that names a job, by its owner, a colleague of each role, and a stranger."""
    admin = (await plane.administration.first_start()).secret
    async with client(plane) as http:
        by_admin = {"authorization": f"Bearer {admin}"}
        keys = {}
        for name, its_role in (("ann", "member"), ("bob", role.value)):
            made = await http.post("/users", json={"name": name, "role": its_role}, headers=by_admin)
            keys[name] = {"authorization": f"Bearer {made.json()['secret']}"}
        made = await http.post("/tenants", json={"name": "other"}, headers=by_admin)
        keys["stranger"] = {"authorization": f"Bearer {made.json()['secret']}"}
        for method, route in routes(application(plane)):
            if not of_a_job(route):
                continue
            allowed = role is Role.ADMIN or (method, route.path) not in OWNERS
            answers = {}
            for name, headers in keys.items():
                job = await submit(plane.store, "default", "ann")
                path = at_once(filled(route.path, job.job_id))
                answer = await http.request(method, path, json=BODIES.get((method, route.path)), headers=headers)
                answers[name] = answer.status_code, answer.text.replace(job.job_id, "")
                none = await http.request(method, path.replace(job.job_id, "job-0"), headers=headers)
                hidden = none.status_code, none.text.replace("job-0", "")
                if name == "stranger":
                    assert answers[name] == hidden, (method, route.path, name)
            assert answers["ann"][0] in (200, 201) or answers["ann"][1] != hidden[1], (method, route.path)
            assert (answers["bob"][0] == 403) == (not allowed), (method, route.path)


async def test_a_job_gets_another_key_and_that_of_before_is_void(plane):
    admin = (await plane.administration.first_start()).secret
    async with client(plane) as http:
        headers = {"authorization": f"Bearer {admin}"}
        job = (await http.post("/jobs", json={"config": {"name": "sums"}}, headers=headers)).json()["job_id"]
        answer = await http.post(f"/jobs/{job}/rotate-key", headers=headers)
        assert (answer.status_code, "no key yet" in answer.text) == (404, True)
        run = plane.scheduler.folder_of(job) / "run"
        run.mkdir(parents=True)
        ring = KeyRing(SecretFile(run).current, "sums")
        write_private(run / "api_key", ring.job_key)
        old, episode = ring.job_key, ring.episode_key("e", 1)
        new = (await http.post(f"/jobs/{job}/rotate-key", headers=headers)).json()["api_key"]
        assert ring.check(new) == JobKey()
        assert (run / "api_key").read_text().strip() == new
        for void in (old, episode):
            with pytest.raises(Unauthorized):
                ring.check(void)
        assert KeyRing(SecretFile(run).current, "sums").job_key == new  # after a restart, too


async def test_the_keys_of_a_job_are_changed_one_after_another(plane, monkeypatch):
    """Secret and key are two files: those of two changes at the same time might not fit together."""
    admin = (await plane.administration.first_start()).secret
    busy, overlapped = threading.Lock(), []

    def slow(run, name):
        overlapped.append(not busy.acquire(blocking=False))
        time.sleep(0.05)
        if not overlapped[-1]:
            busy.release()
        return "pj-new"

    monkeypatch.setattr(jobs_api, "rotate_keys", slow)
    async with client(plane) as http:
        headers = {"authorization": f"Bearer {admin}"}
        job = (await http.post("/jobs", json={"config": {}}, headers=headers)).json()["job_id"]
        answers = [http.post(f"/jobs/{job}/rotate-key", headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in await asyncio.gather(*answers)] == [200] * 3
    assert overlapped == [False] * 3


async def test_a_key_that_sends_too_much_is_told_when_to_come_again(plane):
    admin = (await plane.administration.first_start()).secret
    async with client(plane) as http:
        headers = {"authorization": f"Bearer {admin}"}
        codes = [(await http.get("/me", headers=headers)).status_code for _ in range(201)]
        assert codes == [200] * 200 + [429]
        answer = await http.get("/me", headers=headers)
        assert int(answer.headers["retry-after"]) >= 1
        plane.store.clock.advance(60)
        assert (await http.get("/me", headers=headers)).status_code == 200


NO_JOBS = [
    b"",
    b"{",
    b"[]",
    b'{"config": []}',
    b'{"config": {"steps": "many"}}',
    b'{"config": {}, "resources": {"gpus": -1}}',
    b'{"config": {}, "resources": {"gpus": NaN}}',
    b'{"config": {}, "name": "\\u0000"}',
    b'{"config": {}, "name": ""}',
    b'{"config": {}, "priority": "highest"}',
    b'{"config": {}, "kind": "baking"}',
    b'{"config": {"kind": "training"}, "kind": "inference"}',
    b'{"kind": "inference"}',
    b'{"config": {"x": ' + b"[" * 5000 + b"]" * 5000 + b"}}",
    b'{"config": {"name": "' + b"x" * (2 * 2**20) + b'"}}',
    b'{"config": {"run_dir": "/etc"}}',
    b'{"config": {"policies": {"p": {"model": "../../other"}}}}',
    b'{"config": {"policies": {"p": {"model": "~/.ssh"}}}}',
]


async def test_what_is_no_job_is_refused_in_words_and_the_server_goes_on(plane):
    admin = (await plane.administration.first_start()).secret
    async with client(plane) as http:
        headers = {"authorization": f"Bearer {admin}", "content-type": "application/json"}
        for body in NO_JOBS:
            answer = await http.post("/jobs", content=body, headers=headers)
            assert answer.status_code in (400, 413, 422), (body[:80], answer.text)
            assert answer.json()["error"]["message"], body[:80]
            assert (await http.get("/jobs", headers=headers)).json() == {"jobs": [], "cursor": None}, body[:80]


async def test_the_same_submission_again_is_the_same_job_and_another_body_a_conflict(plane):
    admin = (await plane.administration.first_start()).secret
    async with client(plane) as http:
        headers = {"authorization": f"Bearer {admin}", "idempotency-key": "once"}
        first = await http.post("/jobs", json={"config": {"steps": 2}}, headers=headers)
        again = await http.post("/jobs", json={"config": {"steps": 2}}, headers=headers)
        assert first.status_code == again.status_code == 201
        assert first.json()["job_id"] == again.json()["job_id"]
        assert (await http.post("/jobs", json={"config": {"steps": 3}}, headers=headers)).status_code == 409


async def test_a_long_body_is_parsed_in_a_thread_and_a_short_one_is_not(plane, monkeypatch):
    in_threads = []
    run = plane.pool.run

    async def noted(function, *arguments):
        in_threads.extend(len(one) for one in arguments if isinstance(one, bytes))  # a body, and not what is made of it
        return await run(function, *arguments)

    monkeypatch.setattr(plane.pool, "run", noted)
    admin = (await plane.administration.first_start()).secret
    async with client(plane) as http:
        headers = {"authorization": f"Bearer {admin}"}
        wrong = {"config": {"name": "x" * LONG_BODY}}
        assert (await http.post("/jobs", json=wrong, headers=headers)).status_code == 400
        assert len(in_threads) == 1
        assert (await http.post("/jobs", json={"config": {"steps": 2}}, headers=headers)).status_code == 201
        assert len(in_threads) == 1


async def test_a_body_is_not_read_where_its_sender_may_not_do_what_it_asks_for(plane):
    admin = (await plane.administration.first_start()).secret
    async with client(plane) as http:
        made = await http.post("/users", json={"name": "eve"}, headers={"authorization": f"Bearer {admin}"})
        headers = {"authorization": f"Bearer {made.json()['secret']}"}
        assert (await http.post("/users", content=b"{", headers=headers)).status_code == 403
