"""The client of a data plane for event loops."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

import httpx2

from palestra.client.episode import Episode, renewed
from palestra.client.exchange import (
    GIVE_BACK_SECONDS,
    Action,
    Exchange,
    Reply,
    claim,
    hand_in,
    release_episode,
    send_call,
)
from palestra.client.model_call import ModelCall, ModelReply, model_call
from palestra.client.protocol import (
    A,
    ApiCall,
    abort_call,
    claim_call,
    facts_call,
    read_claim,
    upload_call,
)
from palestra.client.requests import EpisodeRequests
from palestra.client.seat import AsyncSeat, claim_next_seat
from palestra.errors import PalestraError
from palestra.http_clients import async_http_client
from palestra.pictures.blobs import picture_digest
from palestra.threads import in_thread
from palestra.types.wire import ClaimAnswer, RolloutFacts

log = logging.getLogger("palestra.client")
T = TypeVar("T")
UPLOADED_SECONDS = 1800.0  # after which a picture is uploaded again: a job removes those that it has not used for long
MOST_UPLOADED = 65_536  # digests that a client remembers; a picture that is forgotten is uploaded again
# Returns the present URL and key of a data plane. May block; raises JobOver if the job is over.
Find = Callable[[], tuple[str, str]]


class AsyncClient(EpisodeRequests[Coroutine[Any, Any, None]]):
    """The asynchronous client of a data plane; see `Client` for leases."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        worker_id: str | None = None,
        retry_seconds: float = 300.0,
        find: Find | None = None,
    ) -> None:
        """Create a client of the data plane at `url`; see `EpisodeRequests`. `find`: returns the server's present URL
        and key. Called whenever the server cannot be reached, because a restarted job may have another address.
        """
        super().__init__(url, api_key, worker_id=worker_id, retry_seconds=retry_seconds)
        self._http = async_http_client()
        self._find, self._finding = find, asyncio.Lock()
        self._uploaded: dict[str, float] = {}  # when each picture was uploaded, in monotonic seconds; oldest first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, like the end of an `async with` block."""
        await self._http.aclose()

    async def begin_episode(self, *, allow_discard_timeout: float | None = None) -> Episode | None:
        """Claim the next episode, waiting for one; None when the job is over. See `Client.begin_episode`.

        If the caller is cancelled, an episode just claimed for it is released.

        Args:
            allow_discard_timeout: lease of the episode in seconds; None: the job's setting.
        """
        episode, over = None, False
        while episode is None and not over:
            call = claim_call(self._settings.worker_id, allow_discard_timeout)
            try:
                episode, over = await self._run(claim(self._settings, call))
            except asyncio.CancelledError:
                await asyncio.shield(self._give_back_claimed(call))
                raise
        return episode

    async def _give_back_claimed(self, call: ApiCall[ClaimAnswer]) -> None:
        """Repeat a claim whose answer was not awaited, which returns the same episode, and release that."""
        body = call.body.model_copy(update={"wait_seconds": 0.0})
        try:
            episode, _ = read_claim(await self._send(replace(call, body=body), GIVE_BACK_SECONDS))
            if episode is not None:
                await self._send(abort_call(episode, "cancelled: the worker was stopped", False), GIVE_BACK_SECONDS)
        except PalestraError as problem:
            log.info("a claim could not be given back, its lease runs out instead: %s", problem)

    async def facts(self) -> RolloutFacts:
        """Return what a worker that plays an environment needs to know about the job."""
        return await self._send(facts_call())

    async def call_model(self, episode: Episode, call: ModelCall) -> ModelReply:
        """Make one model call of an episode; when it returns, the call is recorded.

        Args:
            episode: the claimed episode.
            call: the request.

        Raises:
            ContextOverflow: the prompt leaves no space for a reply.
            EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
            PalestraError: the call was refused, or the server did not answer for too long.
        """
        return await self._send(model_call(episode, call))

    async def upload_picture(self, data: bytes, digest: str | None = None, episode: Episode | None = None) -> str:
        """Upload a picture once, and return its digest for use in messages.

        Args:
            data: the file: PNG, JPEG, WebP or GIF, with one frame.
            digest: its SHA-256, in hex; None: computed here.
            episode: whose key to use; None: the job's.

        Raises:
            InvalidRequest: the file is not a supported picture.
            PayloadTooLarge: it is too large, or the run's pictures have no capacity for it.
        """
        name = picture_digest(data) if digest is None else digest
        now = time.monotonic()
        if now - self._uploaded.get(name, -math.inf) > UPLOADED_SECONDS:
            await self._send(upload_call(data, name, None if episode is None else episode.api_key))
            self._uploaded.pop(name, None)
            self._uploaded[name] = now
            if len(self._uploaded) > MOST_UPLOADED:
                self._uploaded.pop(next(iter(self._uploaded)))
        return name

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode | None]:
        """Claim an episode for an `async with` block, in which `episode.reward` is set. See `Client.episode`."""
        episode = await self.begin_episode()
        if episode is None:
            yield None
            return
        async with self._held(
            episode,
            lambda: hand_in(self._settings, episode),
            lambda error: release_episode(self._settings, episode, error),
        ):
            yield episode

    @asynccontextmanager
    async def seat(self, role: str, *, episode_id: str | None = None) -> AsyncIterator[AsyncSeat | None]:
        """Claim an external player's slot of an episode for an `async with` block. See `Client.seat`.

        Args:
            role: name of the role.
            episode_id: of the only episode to join; None: any.
        """
        claimed = await self._run(claim_next_seat(self._settings, role, episode_id))
        if claimed is None:
            yield None
            return
        seat = AsyncSeat(self._run, self._settings, claimed, role)
        async with self._held(claimed, seat.leaving, seat.settled):
            yield seat

    @asynccontextmanager
    async def _held(
        self, episode: Episode, end: Callable[[], Exchange[None]], settle: Callable[[BaseException], Exchange[bool]]
    ) -> AsyncIterator[None]:
        """Renew a lease for a block, then call `end`; an error is raised again unless it is settled."""
        try:
            async with renewed(self.heartbeat, episode):
                yield
                await self._run(end())
        except BaseException as error:
            if not await self._run(settle(error)):
                raise

    async def _send(self, call: ApiCall[A], retry_seconds: float | None = None) -> A:
        return await self._run(send_call(self._settings, call, retry_seconds))

    async def _finish(self, steps: Exchange[None]) -> None:
        await self._run(steps)

    async def _run(self, steps: Exchange[T]) -> T:
        return await drive_async(self._http, steps, self._has_moved)

    async def _has_moved(self, url: str) -> bool:
        """Return whether the server's address has changed since a request. Only one of several callers looks it up."""
        if self._find is None:
            return False
        async with self._finding:
            if url.startswith(self._settings.url + "/"):
                found, key = await in_thread(self._find)
                self._settings.move(found, key)
        return not url.startswith(self._settings.url + "/")


async def drive_async(
    http: httpx2.AsyncClient, steps: Exchange[T], has_moved: Callable[[str], Awaitable[bool]] | None = None
) -> T:
    """Execute the actions that an exchange yields, and return its result; see `palestra.client.client.drive`.
    `has_moved`: returns whether an unreachable server has a new URL now; None: never.
    """
    try:
        action = next(steps)
        while True:
            try:
                reply = await _done(http, action, has_moved)
            except PalestraError as error:
                action = steps.throw(error)
            else:
                action = steps.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result


async def _done(http: httpx2.AsyncClient, action: Action, has_moved: Callable[[str], Awaitable[bool]] | None) -> Reply:
    if isinstance(action, float):
        await asyncio.sleep(action)
        return None
    try:
        return await http.request(**action)
    except httpx2.RequestError as error:
        return None if has_moved is not None and await has_moved(action["url"]) else error
