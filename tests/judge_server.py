"""A judge behind real HTTP that says what a test tells it."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DATA = re.compile(r"\A<<<DATA ([0-9a-f]+)>>>\n(.*)\n<<<END \1>>>\Z", re.DOTALL)


@dataclass
class Asked:
    """A question, as a good judge reads it: the data lie between the lines that have the question's id."""

    id: str
    system: str
    data: dict[str, Any]
    body: dict[str, Any]
    shown: list[dict[str, Any]] = field(default_factory=list)  # the parts behind the data

    @property
    def criteria(self) -> list[dict[str, Any]]:
        text = self.system.partition("in this order:\n")[2]
        return json.JSONDecoder().raw_decode(text)[0]

    @property
    def text(self) -> str:
        """What was replied."""
        return self.data["reply"]["text"]

    def choose(self, choose: Callable[[dict[str, Any]], str], reason: str = "so") -> str:
        """An answer that chooses for each criterion."""
        found = [{"name": one["name"], "reason": reason, "choice": choose(one)} for one in self.criteria]
        return json.dumps({"id": self.id, "criteria": found})

    def rank(self, value: Callable[[str], float], bias: float = 0.0, noise: float = 0.0) -> str:
        """A ranking by the value of each text, for which earlier places count `bias` more from last to first."""
        replies, draw = self.data["replies"], random.Random(self.id)
        last = max(len(replies) - 1, 1)
        seen = {
            one["id"]: value(one["reply"]["text"]) + bias * (1 - place / last) + draw.gauss(0, noise)
            for place, one in enumerate(replies)
        }
        ranking = sorted(seen, key=lambda one: -seen[one])
        reasons = {one: f"worth {seen[one]:.2f}" for one in seen}
        return json.dumps({"id": self.id, "reasons": reasons, "ranking": ranking})


@dataclass
class JudgeServer:
    url: str
    asked: list[Asked] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


Answer = Callable[
    [Asked], Any
]  # a text; or (status, body, retry-after) of the whole HTTP answer, the last of which may be left out


@contextmanager
def judging(answer: Answer) -> Iterator[JudgeServer]:
    """Serve a judge while the block is open; it notes all that it is asked."""
    known = JudgeServer("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send(200, json.dumps({"data": [{"id": "scripted"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            system, user = (message["content"] for message in body["messages"])
            user, shown = (user, []) if isinstance(user, str) else (user[0]["text"], user[1:])
            found = DATA.match(user)
            assert found is not None, user
            asked = Asked(found[1], system, json.loads(found[2]), body, shown)
            known.asked.append(asked)
            known.keys.append(self.headers["authorization"])
            said = answer(asked)
            if isinstance(said, tuple):
                self.send(*said)
                return
            whole = {"choices": [{"message": {"content": said}}], "usage": {"total_tokens": 100}}
            self.send(200, json.dumps(whole).encode())

        def send(self, status: int, body: bytes, retry_after: str = "") -> None:
            self.send_response(status)
            if retry_after:
                self.send_header("retry-after", retry_after)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # the judge's client has left

    server = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
