"""The server of `palestra dashboard`: the page for runs in folders, with a chat playground for their checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Literal

import httpx2
from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from palestra.config import JobConfig
from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.files import PAGE
from palestra.dashboard.routes import create_page_app
from palestra.dashboard.runs import Run
from palestra.errors import Conflict, InvalidRequest, NotFound, PalestraError
from palestra.http.server import LOOPBACK, listen, served, url_of
from palestra.http.sse import AS_IT_COMES
from palestra.http_clients import async_http_client
from palestra.runtime.starting_points import all_checkpoints
from palestra.threads import in_thread
from palestra_inspect.checkpoint_server import CheckpointServer, Served

MOST_BYTES = 8 * 2**20  # of a conversation
CONNECT_SECONDS = 10.0
TALK = f"{PAGE}/api/runs/{{run}}/talk"

PORT = 7413


class PlaygroundState(BaseModel):
    """The page's state of the chat playground for a run."""

    able: bool = Field(description="Whether this page can load a checkpoint of the run.")
    why: str = Field("", description="Why it can't; empty: it can.")
    checkpoints: list[str] = Field(description="That there are, by names such as `policy@step-20`; the newest first.")
    state: Literal["none", "loading", "ready", "ended"] = Field(description="Of the run's checkpoint that was loaded.")
    checkpoint: str = Field("", description="That was loaded last; empty: none was.")
    phase: str = Field("", description="Of the loading, in words.")
    reason: str = Field("", description="Why it has ended; empty: it was told to.")
    seconds: float = Field(0.0, description="Since the beginning of its loading.")
    policies: list[str] = Field([], description="That it answers as, once it is ready.")


class Load(BaseModel):
    """Body of the request that loads a checkpoint."""

    model_config = {"extra": "forbid"}

    checkpoint: str = Field(max_length=500)


async def serve_folders(
    runs: Sequence[Run], host: str, port: int | None, ready: Callable[[str, OneTimeLink], None], stop: asyncio.Event
) -> None:
    """Serve the page until `stop` is set. `port`: 0: any free port. None: 7413, or any free port if that is in use.
    `ready`: called with the page's address and access when the server listens.
    """
    listener = listen(host, PORT if port is None else port, or_any=port is None)
    access, stopping = OneTimeLink(), asyncio.Event()
    server = CheckpointServer()
    try:
        async with served(create_folder_app(runs, access, stopping, server, host), listener, stopping.set):
            ready(f"{url_of(listener)}{PAGE}", access)
            await stop.wait()
    finally:
        await server.end()


def create_folder_app(
    runs: Sequence[Run], access: OneTimeLink, stopping: asyncio.Event, server: CheckpointServer, host: str
) -> FastAPI:
    """Return the application that shows runs, and serves a checkpoint of one of them to its user."""
    app = create_page_app(runs, access, stopping, MOST_BYTES)
    known = {run.name: run for run in runs}

    def find(name: str) -> Run:
        if name not in known:
            raise NotFound(f"there is no run {name!r} here")
        return known[name]

    async def state_of(run: Run, response: Response) -> PlaygroundState:
        response.headers["cache-control"] = "no-store"
        return await in_thread(lambda: playground_state(run, server.served, host))

    @app.get(TALK, tags=["talk"])
    async def state(run: str, response: Response) -> PlaygroundState:
        """Return the loadable checkpoints, and the loading state of the last one."""
        return await state_of(find(run), response)

    @app.post(f"{TALK}/load", tags=["talk"])
    async def load(run: str, body: Load, response: Response) -> PlaygroundState:
        """Begin to load a checkpoint in its own process, replacing any other; return at once."""
        found = find(run)
        now = await state_of(found, response)
        if not now.able:
            raise Conflict(now.why)
        if body.checkpoint not in now.checkpoints:
            raise InvalidRequest(f"there is no checkpoint {body.checkpoint!r}", "checkpoint")
        await server.load(found.name, found.folder, body.checkpoint)
        return await state_of(found, response)

    @app.post(f"{TALK}/end", tags=["talk"])
    async def end(run: str, response: Response) -> PlaygroundState:
        """End the checkpoint that is served."""
        found = find(run)
        await server.end()
        return await state_of(found, response)

    @app.post(f"{TALK}/chat/completions", tags=["talk"])
    async def call(run: str, request: Request) -> StreamingResponse:
        """Forward a call to the served checkpoint, like `POST /v1/chat/completions`, without recording it."""
        return await _Passed.on(server.ready(find(run).name), await request.body())

    return app


def playground_state(run: Run, now: Served | None, host: str) -> PlaygroundState:
    """Return the state of the chat playground for a run. `now`: the checkpoint loaded last, of any run; None: none."""
    checkpoints: list[str] = []
    try:
        config = run.config
        checkpoints = list(all_checkpoints(config, run.folder)) if config.kind == "training" else []
        why = _why_not(config, checkpoints, host)
    except PalestraError as error:
        why = str(error)
    mine = now if now is not None and now.run == run.name else None
    if mine is None:
        return PlaygroundState(able=not why, why=why, checkpoints=checkpoints, state="none")
    return PlaygroundState(
        able=not why,
        why=why,
        checkpoints=checkpoints,
        state=mine.state,
        checkpoint=mine.checkpoint,
        phase=mine.phase,
        reason=mine.reason,
        seconds=time.monotonic() - mine.began,
        policies=mine.policies,
    )


def _why_not(config: JobConfig, checkpoints: Sequence[str], host: str) -> str:
    """Return why no checkpoint can be loaded here, in words; empty: one can."""
    if config.kind != "training" or not config.trained_policies:
        return "this run has trained no model"
    if not checkpoints:
        return "this run has no checkpoint yet"
    if host not in LOOPBACK:
        return f"this page listens on {host}, where others could use the model, and not on this machine alone"
    if config.engine.has_model and find_spec("torch") is None:
        return "torch is not installed here; install palestra[train] (in a checkout: pip install '.[train]')"
    return ""


class _Passed(StreamingResponse):
    """A streamed answer of a checkpoint's server."""

    def __init__(self, served: Served, http: httpx2.AsyncClient, answer: httpx2.Response) -> None:
        headers = {**AS_IT_COMES, "content-type": answer.headers.get("content-type", "application/json")}
        super().__init__(answer.aiter_raw(), answer.status_code, headers)
        self._served, self._http, self._answer = served, http, answer

    @classmethod
    async def on(cls, served: Served, body: bytes) -> _Passed:
        """Send a call, and return the answer when its head is there."""
        headers = {"authorization": f"Bearer {served.key}", "content-type": "application/json"}
        http = async_http_client(timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS))
        try:
            with served.called():
                request = http.build_request("POST", f"{served.url}/v1/chat/completions", content=body, headers=headers)
                return cls(served, http, await http.send(request, stream=True))
        except httpx2.HTTPError as error:
            await http.aclose()
            raise Conflict(f"the checkpoint does not answer any more: {str(error) or type(error).__name__}") from error
        except asyncio.CancelledError:
            await http.aclose()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the answer (called by the server); cancel the call if the client disconnects."""
        try:
            with self._served.called():
                await super().__call__(scope, receive, send)
        finally:
            await self._answer.aclose()
            await self._http.aclose()
