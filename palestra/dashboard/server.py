"""The server of `palestra dashboard`: the page for runs in folders, on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse

from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.files import PAGE, public_paths
from palestra.dashboard.routes import SESSION, add_page
from palestra.dashboard.runs import Run
from palestra.http.app import PUBLIC, build_app

MOST_BYTES = 1024  # of a body; no route of this room takes one


def create_page_app(
    runs: Sequence[Run], access: OneTimeLink, stopping: asyncio.Event, most_bytes: int = MOST_BYTES
) -> FastAPI:
    """Return the application that shows runs."""

    async def authenticate(request: Request) -> int:
        if request.scope["path"] != SESSION:  # whose route takes a code in place of the key
            access.check(request)
        return most_bytes

    app = build_app("Palestra dashboard", "Shows runs.", authenticate, most_bytes, {*PUBLIC, "/", *public_paths()})

    @app.get("/", include_in_schema=False)
    async def page() -> RedirectResponse:
        """Redirect to the page; browsers keep the fragment."""
        return RedirectResponse(PAGE)

    add_page(app, runs, access, stopping)
    return app
