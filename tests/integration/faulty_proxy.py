"""A proxy in front of a real server that hurts requests: before the server sees them, or after it has acted."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

BEFORE = ("refuse", "503", "500", "408", "later", "html")  # the server does not get the request
AFTER = ("drop", "half", "garbage", "empty", "other", "html after", "502")  # it gets it, its answer is lost
FAULTS = (*BEFORE, *AFTER)


class FaultyProxy:
    """Hurts one request after another by `faults` in turn ("" for none), and afterwards none."""

    def __init__(self, target: str, faults: Sequence[str] = ()) -> None:
        self.faults, self.passed, self.hurt = list(faults), 0, 0
        self._lock = threading.Lock()
        self._http = httpx2.Client(base_url=target, timeout=30)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None: ...

            def do_POST(self) -> None:
                proxy.pass_on(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._http.close()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        with self._lock:
            fault = self.faults.pop(0) if self.faults else ""
            self.hurt += bool(fault)
            self.passed += not fault
        status, content = 200, b""
        if fault not in BEFORE:
            headers = {name: handler.headers[name] for name in ("authorization", "content-type")}
            answer = self._http.post(handler.path, content=body, headers=headers)
            status, content = answer.status_code, answer.content
        handler.close_connection = True
        if fault in ("refuse", "drop"):
            return
        status = {"503": 503, "500": 500, "408": 408, "later": 429, "502": 502}.get(fault, status)
        wrong = {
            "garbage": random.Random(0).randbytes(50),
            "empty": b"",
            "other": b'{"hello": ["world"]}',
            "html": b"<html>sign in</html>",
            "html after": b"<html>sign in</html>",
        }
        content = wrong.get(fault, content)
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(content)))
        handler.send_header("connection", "close")
        if fault == "later":
            handler.send_header("retry-after", "0")
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2] if fault == "half" else content)
