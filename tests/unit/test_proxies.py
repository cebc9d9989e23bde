"""Proxies: this machine is asked directly by every client of the package, others as the environment says."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from websockets.asyncio.server import serve

import palestra
from palestra.client.async_client import AsyncClient
from palestra.client.client import Client
from palestra.client.exchange import trouble_of
from palestra.errors import ConfigError, PalestraError
from palestra.http_clients import WebSocket, async_http_client, http_client
from palestra.proxies import is_own, proxy_of, spare_own_addresses, through_proxy
from palestra_control.control import ControlClient

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
OWN = ["127.0.0.1", "127.1.2.3", "127.1", "[::1]", "localhost", "LOCALHOST.", "job.localhost", "0.0.0.0", "[::]",
       "[::ffff:127.0.0.1]", socket.gethostname()]  # fmt: skip
OTHERS = ["192.0.2.1", "[2001:db8::1]", "example.com", "localhost.example.com", "127.0.0.1.example.com"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def answering(status: int) -> Iterator[tuple[str, list[str]]]:
    """Serve one status for every request; gives the URL and the lines of the requests that came."""
    lines: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            lines.append(self.requestline)
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST = do_CONNECT = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", lines
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", [name for name in NAMES if "no" not in name.lower()])
@pytest.mark.parametrize("scheme", ["http", "https", "ws", "wss"])
def test_this_machine_has_no_proxy_whatever_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, scheme: str
) -> None:
    monkeypatch.setenv(name, "http://proxy.example:3128")
    assert [proxy_of(f"{scheme}://{host}:7411/x") for host in OWN] == [None] * len(OWN)
    served = name.lower() == "all_proxy" or name.lower() == (
        "http_proxy" if scheme in ("http", "ws") else "https_proxy"
    )
    expected = "http://proxy.example:3128" if served else None
    assert [proxy_of(f"{scheme}://{host}/x") for host in OTHERS] == [expected] * len(OTHERS)


def test_own_addresses() -> None:
    assert all(map(is_own, OWN))
    assert not any(map(is_own, OTHERS))


@pytest.mark.parametrize(
    ("entries", "host", "excepted"),
    [
        ("*", "a.example", True),
        ("example.com", "example.com", True),
        ("example.com", "a.example.com", True),
        ("example.com", "badexample.com", False),
        (".example.com", "a.example.com", True),
        ("*.example.com", "a.example.com", True),
        ("other, example.com", "example.com", True),
        ("example.com:81", "example.com", False),
        ("example.com:80", "example.com", True),
        ("192.0.2.0/24", "192.0.2.9", True),
        ("192.0.2.0/24", "198.51.100.1", False),
        ("2001:db8::/32", "[2001:db8::5]", True),
        ("[2001:db8::5]", "[2001:db8::5]", True),
        ("", "example.com", False),
    ],
)
def test_no_proxy(monkeypatch: pytest.MonkeyPatch, entries: str, host: str, excepted: bool) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", entries)
    assert (proxy_of(f"http://{host}:80/") is None) == excepted


@pytest.mark.parametrize("proxy", ["ftp://proxy.example", "http://", "http://proxy.example:port", "http://proxy:99999"])
def test_what_is_no_proxy_is_refused(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    assert proxy_of("http://127.0.0.1/") is None
    with pytest.raises(ConfigError):
        proxy_of("http://example.com/")


def test_a_proxy_of_socks_harms_no_request_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://192.0.2.1:1080")
    with answering(200) as (url, lines):
        with http_client() as http:
            assert http.get(url).status_code == 200
            with pytest.raises(ConfigError, match=r"proxy.*socks5"):
                http.get("http://example.com/")
        assert len(lines) == 1
    with pytest.raises(ConfigError):
        WebSocket("ws://example.com/")


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_clients_ask_this_machine_directly(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with answering(404) as (url, lines), answering(403) as (proxy, asked):
        monkeypatch.setenv(name, proxy)
        clients = [Client(url, "k", retry_seconds=0), ControlClient(url, "k", retry_seconds=0)]
        with clients[0] as job, clients[1] as plane:
            with pytest.raises(PalestraError):
                job.begin_episode()
            with pytest.raises(PalestraError):
                list(plane.jobs())

        async def claim() -> None:
            async with AsyncClient(url, "k", retry_seconds=0) as client, async_http_client() as http:
                with pytest.raises(PalestraError):
                    await client.begin_episode()
                assert (await http.get(url)).status_code == 404

        asyncio.run(claim())
        assert len(lines) == 4
        assert asked == []


def test_others_are_asked_through_the_proxy_which_the_error_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(403) as (proxy, asked):
        monkeypatch.setenv("HTTP_PROXY", proxy.replace("http://", "http://user:secret@"))
        url = "http://example.com:7411"
        with http_client() as http:
            trouble = trouble_of(url, http.get(f"{url}/x"))
        assert asked == [f"GET {url}/x HTTP/1.1"]
        assert trouble is not None
        assert proxy in str(trouble.error)
        assert "secret" not in str(trouble.error)
    with http_client() as http, pytest.raises(httpx2.ConnectError, match="proxy http://127") as lost:
        http.get(f"{url}/x")  # nothing listens at the proxy's address any more
    assert "secret" not in str(lost.value)
    assert through_proxy("http://127.0.0.1/") == ""


async def test_a_websocket_of_this_machine_is_opened_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(lambda socket: socket.send("hello"), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with answering(403) as (proxy, asked):
            monkeypatch.setenv("ALL_PROXY", proxy)
            async with WebSocket(f"ws://127.0.0.1:{port}/") as socket:
                assert await socket.recv() == "hello"
            with pytest.raises(Exception, match="403"):
                await WebSocket("ws://example.com/")
            assert asked == ["CONNECT example.com:80 HTTP/1.1"]


def test_other_libraries_are_told_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_own_addresses()
    assert "NO_PROXY" not in os.environ
    with answering(404) as (url, lines), answering(403) as (proxy, asked):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "example.com")
        monkeypatch.setenv("no_proxy", "example.com")  # for monkeypatch to undo
        spare_own_addresses()
        spare_own_addresses()
        assert httpx2.get(url).status_code == 404
        assert httpx2.get("http://other.example/").status_code == 403
        assert (len(lines), len(asked)) == (1, 1)
        assert os.environ["NO_PROXY"].startswith("example.com,localhost,127.0.0.1,")


# What chooses a proxy for itself. A subclass is given a transport of `http_clients`.
_MAKERS = {
    "httpx2": {"Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport", "get", "post", "put", "patch", "delete",
               "head", "options", "request", "stream"},
    "aiohttp": {"ClientSession", "request"},
    "requests": {"Session", "get", "post", "put", "patch", "delete", "head", "request"},
    "urllib.request": {"urlopen", "build_opener", "urlretrieve"},
    "http.client": {"HTTPConnection", "HTTPSConnection"},
    "openai": {"OpenAI", "AsyncOpenAI"},
    "anthropic": {"Anthropic", "AsyncAnthropic"},
    "tinker": {"ServiceClient"},
    "websockets.asyncio.client": {"connect"},
    "websockets.sync.client": {"connect"},
    "websockets": {"connect"},
}  # fmt: skip
_MAKERS["httpx"] = _MAKERS["httpx2"]
_ALLOWED = {
    ("palestra/http_clients.py", "Client"), ("palestra/http_clients.py", "AsyncClient"),
    ("palestra/http_clients.py", "HTTPTransport"), ("palestra/http_clients.py", "AsyncHTTPTransport"),
    ("palestra/server/picture_fetch.py", "AsyncClient"),  # to an address that was checked, which a proxy might not keep
    ("palestra_engines/external/process.py", "HTTPTransport"),  # of Unix
}  # fmt: skip


def clients_made(source: str) -> set[str]:
    """Return the names of makers of clients that a module calls."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if node.module in _MAKERS:
                names |= {a.asname or a.name: a.name for a in node.names if a.name in _MAKERS[node.module]}
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in names:
            found.add(names[node.func.id])
        elif isinstance(node.func, ast.Attribute):
            module = modules.get(ast.unparse(node.func.value), "")
            if node.func.attr in _MAKERS.get(module, ()):
                found.add(node.func.attr)
    return found


def test_clients_are_made_in_one_module() -> None:
    root = Path(palestra.__file__).parents[1]
    imports = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(_MAKERS)}|urllib|http)\b", re.MULTILINE)
    made = {
        (str(path.relative_to(root)), name)
        for package in root.glob("palestra*")
        for path in package.rglob("*.py")
        if imports.search(source := path.read_text())
        for name in clients_made(source)
    }
    assert made == _ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import httpx2\nhttpx2.AsyncClient()",
        "import httpx as h\nh.get('x')",
        "from httpx2 import Client\nClient()",
        "import urllib.request\nurllib.request.urlopen('x')",
        "from urllib import request\nrequest.urlopen('x')",
        "from websockets.asyncio.client import connect as c\nc('x')",
        "def f():\n    import openai\n    openai.OpenAI()",
    ],
)
def test_the_search_finds_clients(source: str) -> None:
    assert clients_made(source)
