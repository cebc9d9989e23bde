"""The client of a data plane for event loops."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2

from palestra.client.client import LIMITS
from palestra.client.episode import Episode, Reward, RolloutResult, renewed
from palestra.client.exchange import (
    GIVE_BACK_SECONDS,
    Action,
    Exchange,
    Reply,
    Settings,
    claim,
    hand_in,
    push,
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
    finish_call,
    heartbeat_call,
    read_claim,
    upload_call,
)
from palestra.client.seat import AsyncSeat, seat_of
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


class AsyncClient:
    """The asynchronous client of a data plane; see `Client` for leases.

    Every call is idempotent, and is retried for up to `retry_seconds` while the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        worker_id: str | None = None,
        retry_seconds: float = 300.0,
        find: Find | None = None,
    ) -> None:
        """Create a client of the data plane at `url`.

        Args:
            url: URL of the server, as printed by `palestra run`, e.g. `http://127.0.0.1:7411`.
            api_key: the job's key; None: the environment variable PALESTRA_API_KEY.
            worker_id: a name, recorded with each episode.
            retry_seconds: how long to retry a call while the server cannot be reached.
            find: returns the server's present URL and key. Called whenever the server cannot be reached, because a
                restarted job may have another address.

        Raises:
            ConfigError: there is no key, or `url` is not a valid URL.
        """
        self._settings = Settings(url, api_key, worker_id, retry_seconds)
        self._http = async_http_client(limits=LIMITS)
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

    async def end_episode(
        self,
        episode: Episode,
        reward: Reward | RolloutResult | None = None,
        *,
        step_rewards: Sequence[Reward] | None = None,
        metadata: Mapping[str, Any] | None = None,
        named_rewards: Mapping[str, float | None] | None = None,
        truncated: bool = False,
    ) -> None:
        """Submit the reward of an episode. See `Client.end_episode`, also for errors.

        Args:
            episode: the claimed episode.
            reward: a finite number, or one for each agent by name; None: there are named rewards. Or a `RolloutResult`.
            step_rewards: for each TimeStep, in order, a reward, or rewards by agent; None: none.
            metadata: JSON to record with the episode.
            named_rewards: several rewards of the episode, by name.
            truncated: whether the episode was cut off before its end.
        """
        parts = {"step_rewards": step_rewards, "metadata": metadata, "named_rewards": named_rewards}
        await self._send(finish_call(episode, reward, **parts, truncated=truncated))

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

    async def abort_episode(self, episode: Episode, reason: str = "", *, discard: bool = False) -> None:
        """Release an episode without a reward, because of a failure not caused by the policy.

        Args:
            episode: the claimed episode.
            reason: text to record with the attempt.
            discard: whether to drop the episode instead of retrying it.
        """
        await self._send(abort_call(episode, reason, discard))

    async def heartbeat(self, episode: Episode) -> None:
        """Renew the lease of an episode outside `async with client.episode()`. See `Client.heartbeat`."""
        await self._send(heartbeat_call(episode))

    async def push_tasks(
        self, train: Iterable[Mapping[str, Any]] | str | Path, validation: Iterable[Mapping[str, Any]] | str | Path = ()
    ) -> None:
        """Push all tasks of the job at once. See `Client.push_tasks`.

        Args:
            train: tasks to train on; JSON objects, or the path of a JSONL file.
            validation: tasks to evaluate on, in the same forms.
        """
        await self._run(push(self._settings, train, validation))

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
        claimed, over = None, False
        while claimed is None and not over:
            call = claim_call(self._settings.worker_id, None, role=role, episode_id=episode_id)
            claimed, over = await self._run(claim(self._settings, call, seat_of))
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
