"""A control plane that asks for no keys takes nothing from web pages that its operator opens."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from palestra_service.api import PUBLIC, create_control_app
from palestra_service.page import create_service_app
from unit.control.building import control_plane
from unit.http.test_guard import routes_of, status

URL = "http://127.0.0.1:7400"
USER = '{"name": "mallory", "role": "admin"}'
JSON = {"content-type": "application/json"}


@pytest.fixture
async def plane(sqlite_store, tmp_path):
    return control_plane(sqlite_store, tmp_path, without_keys=True)


@pytest.fixture
async def http(plane):
    transport = httpx2.ASGITransport(create_control_app(plane), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url=URL) as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=application/json"},
        {"content-type": "application/jsonp"},
        {},
        JSON | {"origin": "http://evil.example"},
        JSON | {"origin": "null"},
        JSON | {"origin": "http://127.0.0.1:8000"},
        JSON | {"origin": "http://localhost:7400"},
        JSON | {"origin": "https://127.0.0.1:7400"},
        JSON | {"host": "evil.example"},
        JSON | {"host": "evil.example", "origin": "http://evil.example"},
        JSON | {"host": "127.0.0.1.evil.example:7400"},
        JSON | {"host": "localhost.:7400"},
        JSON | {"host": "192.168.1.2:7400"},
        JSON | {"host": ""},
        JSON | {"sec-fetch-site": "cross-site"},
        JSON | {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
async def test_what_a_page_sends_is_refused(http, headers):
    refused = await http.post("/users", content=USER, headers=headers)
    assert refused.status_code in (403, 422)
    assert refused.json()["error"]["code"] in ("forbidden", "invalid_request")
    assert "mallory" not in (await http.get("/users")).text


@pytest.mark.parametrize("host", ["127.0.0.1:7400", "localhost:7400", "LOCALHOST", "[::1]:7400", "localhost:8000"])
async def test_what_commands_and_its_own_page_send_is_taken(http, host):
    own = {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    for number, headers in enumerate(({}, own)):
        asked = {"name": f"ann{number}", "role": "member"}
        made = await http.post("/users", json=asked, headers={"host": host, **headers})
        assert made.status_code == 201


async def test_no_route_forgets_it(plane):
    app = create_service_app(plane, asyncio.Event())
    asked = [(method, path) for method, path in routes_of(app) if path not in PUBLIC]
    assert ("POST", "/jobs") in asked
    evil = [(b"host", b"127.0.0.1:7400"), (b"origin", b"http://evil.example")]
    for method, path in asked:
        found, body = await status(app, method, path, evil)
        assert (found, body["error"]["code"]) == (403, "forbidden"), (method, path)
