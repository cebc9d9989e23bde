"""The server of `palestra dashboard`: the page for runs in folders, on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse

from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.files import PAGE, public_paths
from palestra.dashboard.routes import SESSION, add_page
from palestra.dashboard.runs import Run
from palestra.http.app import PUBLIC, build_app, describe
from palestra.http.server import listen, served, url_of

MOST_BYTES = 1024  # of a body; no route takes one


def create_page_app(runs: Sequence[Run], access: OneTimeLink, stopping: asyncio.Event) -> FastAPI:
    """Return the application that shows runs.

    Args:
        runs: what the page shows.
        access: the key, and the code of the link.
        stopping: is set when the server ends.
    """

    async def authenticate(request: Request) -> int:
        if request.scope["path"] != SESSION:  # whose route takes a code in place of the key
            access.check(request)
        return MOST_BYTES

    app = build_app("Palestra dashboard", "Shows runs.", authenticate, MOST_BYTES, {*PUBLIC, "/", *public_paths()})

    @app.get("/", include_in_schema=False)
    async def page() -> RedirectResponse:
        """Lead to the page; a browser keeps what stands behind the `#`."""
        return RedirectResponse(PAGE)

    add_page(app, runs, access, stopping)
    describe(app)
    return app


async def serve_page(
    runs: Sequence[Run], host: str, port: int, ready: Callable[[str, OneTimeLink], None], stop: asyncio.Event
) -> None:
    """Serve the page until `stop` is set.

    Args:
        runs: what the page shows.
        host: name or address of this machine.
        port: 0: any free port.
        ready: is called with the page's address and its access when the server listens.
        stop: ends the server.

    Raises:
        ConfigError: the address is in use.
    """
    listener, access, stopping = listen(host, port), OneTimeLink(), asyncio.Event()
    async with served(create_page_app(runs, access, stopping), listener, stopping.set):
        ready(f"{url_of(listener)}{PAGE}", access)
        await stop.wait()
