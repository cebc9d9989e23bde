"""Whatever bytes, messages and bodies a client sends, a server answers below 500, logs no error, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from urllib.parse import quote

import httpx2
import pytest
import schemathesis
from drawing import drawn, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_values import TEXTS, odd, odd_bodies, quiet_log, written
from schemathesis import GenerationMode
from unit.building import FakeClock
from unit.control.building import control_plane
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from palestra.http.server import listen, served, url_of
from palestra_remote import SessionLimits
from palestra_remote.app import create_env_app
from palestra_remote.sessions import SessionTable
from palestra_remote.wire import PROTOCOL
from palestra_service.page import create_service_app
from palestra_service.store.control_store import ControlStore
from palestra_worlds.gomoku import Gomoku

pytestmark = pytest.mark.ci

GET = b"GET /v1/environment HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n"
POST = b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n"
UPGRADE = (
    b"GET /v1/session HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
WITH_KEY = b"authorization: Bearer k\r\n"
PIECES = [
    GET + b"\r\n",
    (GET + b"\r\n") * 20,
    GET[:30],
    b"GET /%ff%00%ed%a0%80 HTTP/1.1\r\nhost: [::1\r\n" + WITH_KEY + b"\r\n",
    b"GET http://[::1 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\xff\xfe\r\n\r\n",
    GET + b"x: " + b"y" * 100_000,
    GET + WITH_KEY + b"\r\n",
    POST + b"content-length: 100\r\n\r\nabc",
    POST + b"content-length: -3\r\n\r\nabc",
    POST + b"content-length: " + b"9" * 40 + b"\r\n\r\nabc",
    POST + b"transfer-encoding: chunked\r\n\r\nZZ\r\nabc\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n3\r\nabc\r\n",
    UPGRADE + b"\r\n",
    UPGRADE + WITH_KEY + b"\r\n",
    UPGRADE + WITH_KEY + WITH_KEY + b"\r\n",
    UPGRADE.replace(b"13", b"99") + WITH_KEY + b"\r\n",
    UPGRADE.replace(b"session", b"environment") + WITH_KEY + b"\r\n",
]
FRAMES = [
    b"\x81\x82\0\0\0\0{}",
    b"\x82\x82\0\0\0\0{}",
    b"\x81\x82\0\0\0\0\xff\xfe",
    b"\x81\xff\x7f" + b"\xff" * 7 + b"\0" * 4,
    b"\x88\x80\0\0\0\0",
    b"\xff" * 300,
    b"\x01\x81\0\0\0\0\xed\x80\x81\0\0\0\0\xa0",
]
MESSAGES = [
    {"type": "open", "protocol": PROTOCOL, "wait_seconds": 1.0, "system": None},
    {"type": "reset", "episode": 1, "task": {"id": "t", "seed": 3}},
    {"type": "act", "observation_id": "o", "action": {"role": "assistant", "content": "x"}},
    {"type": "cancel", "observation_id": "o"},
    {"type": "abandon"},
]


@contextlib.asynccontextmanager
async def environments():
    table, listener = SessionTable(Gomoku, SessionLimits(sessions=4)), listen("127.0.0.1", 0)
    async with served(create_env_app(table, "k"), listener, table.stop, websocket_bytes=2**20):
        yield url_of(listener)
    await table.close()


async def sends(url: str, pieces: list[bytes], waits: bool) -> None:
    """Send pieces of bytes, and break the connection off."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if waits:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        answer = await reader.read(200)
                        assert b" 500 " not in answer[:20], piece
    writer.transport.abort()


async def still_answers(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, headers={"authorization": "Bearer k"}) as http:
        assert (await http.get("/v1/environment")).status_code == 200


@examples(8, 400, deadline=None)
@given(calls=st.lists(st.tuples(st.lists(st.sampled_from([*PIECES, *FRAMES]), max_size=4), st.booleans()), max_size=6))
def test_bytes_of_any_kind_are_answered(calls):
    async def play() -> None:
        async with environments() as url:
            for pieces, waits in calls:
                await sends(url, pieces, waits)
            await still_answers(url)

    with quiet_log():
        asyncio.run(play())


async def test_each_of_them_is_answered():
    with quiet_log():
        async with environments() as url:
            await asyncio.gather(*(sends(url, [piece], True) for piece in PIECES))
            await asyncio.gather(*(sends(url, [PIECES[15], frame], True) for frame in FRAMES))
            await still_answers(url)


@examples(8, 300, deadline=None)
@given(
    sessions=st.lists(st.lists(st.sampled_from(MESSAGES).flatmap(odd_bodies), max_size=5), max_size=4), begun=st.data()
)
def test_messages_of_any_kind_are_answered(sessions, begun):
    async def play() -> None:
        async with environments() as url:
            address, headers = url.replace("http", "ws", 1) + "/v1/session", {"authorization": "Bearer k"}
            for messages in sessions:
                async with connect(address, additional_headers=headers) as session:
                    with contextlib.suppress(ConnectionClosed, TimeoutError):
                        for message in [*MESSAGES[: begun.draw(st.integers(0, 2))], *messages]:
                            await session.send(written(message).decode())
                        async with asyncio.timeout(0.05):
                            while True:
                                json.loads(await session.recv())
                    assert session.close_code != 1011  # that the server failed
            await still_answers(url)

    with quiet_log():
        asyncio.run(play())


class Service:
    """The application of a service, without a port, and what it has: a job, a user, a tenant and a key."""

    def __init__(self, store: ControlStore, folder) -> None:
        self.loop = asyncio.new_event_loop()
        plane = control_plane(store, folder)
        self.app = create_service_app(plane, asyncio.Event())
        self.key = self.loop.run_until_complete(plane.administration.first_start()).secret
        limits = {"requests_per_minute": 1e9, "burst": 10**9, "open_jobs": 10**9}
        self.key = self.ask("POST", "/keys", {"limits": limits}).json()["secret"]
        user, job = self.ask("POST", "/users", {"name": "ann"}).json(), self.ask("POST", "/jobs", {"config": {}}).json()
        self.ask("POST", "/tenants", {"name": "ann"})
        name = job["job_id"]
        self.known = {"job_id": name, "run": name, "key_id": user["key_id"], "name": "ann", "from_job": name}

    def ask(self, method: str, path: str, body: object = None):
        async def answer():
            transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
            headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
            async with httpx2.AsyncClient(transport=transport, base_url="http://control", headers=headers) as http:
                async with asyncio.timeout(20):
                    return await http.request(method, path, content=b"" if body is None else written(body))

        return self.loop.run_until_complete(answer())


@pytest.fixture
def service(tmp_path):
    with ControlStore(f"sqlite:///{tmp_path / 'control.db'}", FakeClock()) as store:
        yield (made := Service(store, tmp_path))
        made.loop.close()


CONFIG = {"steps": 3, "policies": {"policy": {"model": "tiny-random", "sampling": {"temperature": 1.0}}}, "seed": 1}


def asked(service: Service, operation, case, data) -> None:
    """Ask a route, with what it knows or with odd values in the places of path, query and body."""
    path = operation.path
    for name in case.path_parameters or {}:
        value = service.known.get(name, "x") if data.draw(st.booleans()) else data.draw(odd)
        path = path.replace(f"{{{name}}}", quote(str(value).encode(errors="surrogatepass"), safe=""))
    query = {k: v if data.draw(st.booleans()) else data.draw(odd) for k, v in (case.query or {}).items()}
    if operation.path.endswith("/events"):
        query["follow"] = "false"
    path += "?" + "&".join(f"{k}={quote(str(v).encode(errors='surrogatepass'), safe='')}" for k, v in query.items())
    body = case.body if isinstance(case.body, dict) else None
    if body is not None:
        body |= {name: service.known[name] for name in body if name in service.known and data.draw(st.booleans())}
        if operation.label == "POST /jobs" and data.draw(st.booleans()):
            body = {"config": CONFIG}
        body = data.draw(odd_bodies(body)) if data.draw(st.booleans()) else body
    answer = service.ask(operation.method.upper(), path, body)
    assert answer.status_code < 500, (operation.label, path, body, answer.text)


def ask_often(service: Service, operation) -> None:
    @settings(
        max_examples=drawn(1, 40),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE), data=st.data())
    def any_request(case, data) -> None:
        asked(service, operation, case, data)

    any_request()


@pytest.mark.more_examples
def test_routes_of_a_service_answer_whatever_is_asked(service):
    schema = schemathesis.openapi.from_dict(service.ask("GET", "/openapi.json").json())
    with quiet_log():
        for found in schema.get_all_operations():
            ask_often(service, found.ok())


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_odd_texts_in_a_job_are_answered(service, text):
    with quiet_log():
        for body in (
            {"name": text, "config": CONFIG},
            {"config": CONFIG | {"name": text}},
            {"config": CONFIG | {"environment": {"name": text}}},
            {"config_toml": f"name = {json.dumps(text)}"},
            {"config": CONFIG, "from_job": text},
        ):
            assert service.ask("POST", "/jobs", body).status_code < 500
