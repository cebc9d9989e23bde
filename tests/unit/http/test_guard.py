"""No route, of either plane, reads anything of a body before the key is known to be good."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi.routing import APIRoute
from property.test_bodies import Served

from palestra.http.app import PUBLIC
from palestra_service.api import PUBLIC as CONTROL_PUBLIC
from palestra_service.api import create_control_app
from palestra_service.store.control_store import ControlStore
from unit.control.building import control_plane

KEYS = [None, "nonsense", "pe-e.1.0", "pk_000000000000_" + "x" * 43]


def routes_of(app) -> list[tuple[str, str]]:
    names = {"{path}": "x", "{job_id}": "job-0000000000000000", "{name}": "n", "{key_id}": "000000000000"}
    found = [(method.upper(), path) for path, kinds in app.openapi()["paths"].items() for method in kinds]
    for written, value in names.items():
        found = [(method, path.replace(written, value)) for method, path in found]
    return found


async def status(app, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, dict]:
    """Ask with a body of which nothing ever comes."""
    sent: list[dict] = []

    async def never() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "server": ("h", 1), "client": ("c", 1)}
    scope |= {"asgi": {"version": "3.0"}, "root_path": ""}
    await asyncio.wait_for(app(scope, never, send), 5)
    return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]) or b"null")


@pytest.fixture
def data_plane(tmp_path):
    served = Served(tmp_path)
    yield served
    served.close()


def headers(key: str | None) -> list[tuple[bytes, bytes]]:
    body = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
    return body if key is None else [*body, (b"authorization", b"Bearer " + key.encode())]


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_on_the_data_plane(data_plane, key):
    asked = [(m, p) for m, p in routes_of(data_plane.app) if p not in PUBLIC]
    assert {("POST", "/tasks"), ("POST", "/v1/messages"), ("POST", "/claim_episode")} <= set(asked)
    odd = [
        ("POST", "/no/such/route"),
        ("PUT", "/tasks"),
        ("HEAD", "/status"),
        ("OPTIONS", "/tasks"),
        ("GET", "//status"),
    ]
    odd += [
        ("POST", "/v1/chat/completions/"),
        ("GET", "/openapi.json/"),
        ("GET", "/openapi.json/../status"),
        ("FOO", "*"),
    ]
    for method, path in [*asked, *odd]:
        found, body = data_plane.loop.run_until_complete(status(data_plane.app, method, path, headers(key)))
        assert found == 401, (method, path, body)
        assert "key" in body["error"]["message"]


@pytest.mark.parametrize("key", KEYS)
async def test_on_the_control_plane(tmp_path, key):
    with ControlStore(f"sqlite:///{tmp_path / 'control.db'}") as store:
        app = create_control_app(control_plane(store, tmp_path))
        asked = [(m, p) for m, p in routes_of(app) if p not in CONTROL_PUBLIC]
        assert ("POST", "/jobs") in asked
        for method, path in asked:
            found, body = await status(app, method, path, headers(key))
            assert found == 401, (method, path, body)


def bodies_read_by_the_framework(app, known: str) -> list[str]:
    """Return the routes whose bodies would be parsed on the event loop."""
    routers = [getattr(route, "original_router", None) for route in app.routes]
    routes = [*app.routes, *(route for router in routers if router for route in router.routes)]
    mine = {route.path: route for route in routes if isinstance(route, APIRoute)}
    assert known in mine
    return [path for path, route in mine.items() if route.body_field is not None]


def test_no_route_of_the_data_plane_leaves_its_body_to_the_framework(data_plane):
    assert bodies_read_by_the_framework(data_plane.app, "/claim_episode") == []


def test_no_route_of_the_control_plane_leaves_its_body_to_the_framework(tmp_path):
    with ControlStore(f"sqlite:///{tmp_path / 'control.db'}") as store:
        app = create_control_app(control_plane(store, tmp_path))
        assert bodies_read_by_the_framework(app, "/jobs") == []
        posted = app.openapi()["paths"]["/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert posted == {"$ref": "#/components/schemas/SubmitJob"}
