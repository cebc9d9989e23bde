"""A small site on this machine, which notes what it is asked, and an environment that opens its pages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from palestra.envs import Progress
from palestra_screens import BrowserEnvironment
from palestra_screens.browser.page import BrowserPage

KINDS = {".js": "text/javascript", ".svg": "image/svg+xml"}


class Site:
    """Pages by path; every request that comes is in `asked`, and `?after=SECONDS` is answered so much later."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        site, self.asked = self, []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                path, _, query = self.path.partition("?")
                if query.startswith("after="):
                    time.sleep(float(query.removeprefix("after=")))
                body = pages.get(path, "").encode()
                self.send_response(200 if path in pages else 404)
                kind = KINDS.get(Path(path).suffix, "text/html; charset=utf-8")
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "max-age=3600")
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def site(pages: Mapping[str, str]) -> Iterator[Site]:
    made = Site(pages)
    try:
        yield made
    finally:
        made.close()


class Visit(BrowserEnvironment):
    """Opens the task's URL; the answer is worth 1 if it is the task's."""

    async def begin(self, page: BrowserPage, task: Mapping[str, Any]) -> str:
        self.wanted = task.get("answer")
        await page.goto(task["url"])
        return "Read the page."

    async def progress(self, answer: str | None) -> Progress:
        return Progress(reward=float(answer is not None and answer == self.wanted))
