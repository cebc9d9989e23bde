"""The client of a data plane for event loops."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2

from palestra.client.client import LIMITS
from palestra.client.episode import (
    GIVE_BACK_SECONDS,
    Episode,
    Reward,
    StepRecords,
    not_given_back,
    reason_of,
    renewed,
    reward_of,
)
from palestra.client.exchange import Action, Reply, Settings, send_call
from palestra.client.model_call import ModelCall, ModelReply, model_call
from palestra.client.protocol import (
    Call,
    abort_call,
    claim_call,
    end_call,
    facts_call,
    heartbeat_call,
    push_calls,
    read_claim,
    upload_call,
)
from palestra.client.seat import AsyncSeat, seat_of
from palestra.client.task_files import task_source
from palestra.errors import ClaimOver, JobOver, PalestraError
from palestra.http_clients import async_http_client
from palestra.pictures.blobs import digest_of
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

    Every call is safe to send again, and is sent again for up to `retry_seconds` while the server can't be reached.
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
            url: URL of the server, as `palestra run` prints it, e.g. `http://127.0.0.1:7411`.
            api_key: the job's key; None: the environment variable PALESTRA_API_KEY.
            worker_id: a name to be recorded with each episode.
            retry_seconds: how long a call is sent again while the server can't be reached.
            find: returns the server's present URL and key. Called whenever the server can't be reached, because a job
                that was started again may have another address.

        Raises:
            ConfigError: there is no key, or `url` can't be the URL of a data plane.
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
        """Close the connections. `async with` does it at the end of its block."""
        await self._http.aclose()

    async def begin_episode(self, *, allow_discard_timeout: float | None = None) -> Episode | None:
        """Claim the next episode, waiting for one; None when the job is over. See `Client.begin_episode`.

        If the caller is cancelled, an episode that the server has just claimed for it is given back.

        Args:
            allow_discard_timeout: lease of the episode in seconds; None: the job's setting.
        """
        while True:
            call = claim_call(self._settings.worker_id, allow_discard_timeout)
            try:
                answer = await self._send(call)
            except asyncio.CancelledError:
                await asyncio.shield(self._give_back_claimed(call))
                raise
            except JobOver:
                return None
            except ClaimOver:
                continue
            episode, finished = read_claim(answer)
            if episode is not None or finished:
                return episode

    async def _give_back_claimed(self, call: Call[ClaimAnswer]) -> None:
        """Send a claim whose answer was not awaited once more, which gets the same episode, and give that back."""
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
        reward: Reward | None = None,
        *,
        step_rewards: Sequence[Reward] | None = None,
        metadata: Mapping[str, Any] | None = None,
        named_rewards: Mapping[str, float | None] | None = None,
        steps: StepRecords | None = None,
        truncated: bool = False,
    ) -> None:
        """Hand in the reward of an episode. See `Client.end_episode`, also for errors.

        Args:
            episode: the claimed episode.
            reward: a finite number, or one for each agent by name; None: there are named rewards.
            step_rewards: for each TimeStep, in order, a reward, or rewards by agent; None: none.
            metadata: JSON to record with the episode.
            named_rewards: several rewards of the episode, by name.
            steps: what a player of Palestra's own knows of the episode; None: nothing.
            truncated: whether the episode was cut off before its end.
        """
        await self._send(end_call(episode, reward, step_rewards, metadata, named_rewards, steps, truncated))

    async def facts(self) -> RolloutFacts:
        """Return what a worker that plays an environment has to know of the job."""
        return await self._send(facts_call())  # type: ignore[no-any-return]

    async def call_model(self, episode: Episode, call: ModelCall) -> ModelReply:
        """Make one model call of an episode; when it returns, the call is recorded.

        Args:
            episode: the claimed episode.
            call: what is asked.

        Raises:
            ContextOverflow: the prompt leaves no room for a reply.
            EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
            PalestraError: the call was refused, or the server did not answer for long.
        """
        return await self._send(model_call(episode, call))  # type: ignore[no-any-return]

    async def upload_picture(self, data: bytes, digest: str | None = None, episode: Episode | None = None) -> str:
        """Upload a picture once, and return the digest by which messages may name it.

        Args:
            data: the file: PNG, JPEG, WebP or GIF, with one frame.
            digest: its SHA-256, in hex; None: it is computed.
            episode: whose key is sent; None: the job's.

        Raises:
            InvalidRequest: the file is no picture that the job takes.
            PayloadTooLarge: it is too large, or the run's pictures have no room for it.
        """
        name = digest_of(data) if digest is None else digest
        now = time.monotonic()
        if now - self._uploaded.get(name, -math.inf) > UPLOADED_SECONDS:
            await self._send(upload_call(data, name, None if episode is None else episode.api_key))
            self._uploaded.pop(name, None)
            self._uploaded[name] = now
            if len(self._uploaded) > MOST_UPLOADED:
                self._uploaded.pop(next(iter(self._uploaded)))
        return name

    async def abort_episode(self, episode: Episode, reason: str = "", *, discard: bool = False) -> None:
        """Give an episode back without a reward, because of a failure that is not the policy's doing.

        Args:
            episode: the claimed episode.
            reason: text to record with the attempt.
            discard: whether to drop the episode instead of having it played again.
        """
        await self._send(abort_call(episode, reason, discard))

    async def heartbeat(self, episode: Episode) -> None:
        """Renew the lease of an episode outside of `async with client.episode()`. See `Client.heartbeat`."""
        await self._send(heartbeat_call(episode))

    async def push_tasks(
        self, train: Sequence[Mapping[str, Any]] | str | Path, validation: Sequence[Mapping[str, Any]] | str | Path = ()
    ) -> None:
        """Give the job all of its tasks in one push. See `Client.push_tasks`.

        Args:
            train: tasks to train on; JSON objects, or the path of a JSONL file.
            validation: tasks to evaluate on, in the same forms.
        """
        for call in push_calls({"validation": task_source(validation), "train": task_source(train)}):
            await self._send(call)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode | None]:
        """Claim an episode for an `async with` block, in which `episode.reward` is set. See `Client.episode`."""
        episode = await self.begin_episode()
        if episode is None:
            yield None
            return
        try:
            async with renewed(self.heartbeat, episode):
                yield episode
                await self.end_episode(
                    episode,
                    reward_of(episode),
                    metadata=episode.metadata,
                    named_rewards=episode.named_rewards,
                    truncated=episode.truncated,
                )
        except BaseException as error:
            try:
                await self._send(abort_call(episode, reason_of(error), discard=False), GIVE_BACK_SECONDS)
            except PalestraError as problem:
                not_given_back(episode, problem)
            raise

    @asynccontextmanager
    async def seat(self, role: str, *, episode_id: str | None = None) -> AsyncIterator[AsyncSeat | None]:
        """Claim a seat of an episode for an `async with` block. See `Client.seat`.

        Args:
            role: name of the seat.
            episode_id: of the only episode to play in; None: any.
        """
        claimed: Episode | None = None
        while claimed is None:
            call = claim_call(self._settings.worker_id, None, role=role, episode_id=episode_id)
            try:
                claimed, finished = seat_of(await self._send(call))
            except JobOver:
                finished = True
            except ClaimOver:
                continue
            if finished:
                yield None
                return
        seat = AsyncSeat(self._send, claimed, role)
        try:
            async with renewed(self.heartbeat, claimed):
                yield seat
                await seat.leave()
        except BaseException as error:
            if await seat.ends_with(error):
                return
            try:
                await self._send(abort_call(claimed, reason_of(error), discard=False), GIVE_BACK_SECONDS)
            except PalestraError as problem:
                not_given_back(claimed, problem)
            raise

    async def _send(self, call: Call[Any], retry_seconds: float | None = None) -> Any:
        sent = count()
        steps = send_call(self._settings, call, retry_seconds, sent)
        reply: Reply = None
        try:
            while True:
                action = steps.send(reply)
                if isinstance(action, float):
                    await asyncio.sleep(action)
                    reply = None
                    continue
                url = self._settings.url
                try:
                    reply = await self._http.request(**action)
                except httpx2.RequestError as error:
                    reply = error
                    # A server at a new address gets the whole `retry_seconds` again.
                    if await self._has_moved(url):
                        steps, reply = send_call(self._settings, call, retry_seconds, sent), None
        except StopIteration as end:
            return end.value

    async def _has_moved(self, url: str) -> bool:
        """Return whether the server's address differs from `url` now. Of several concurrent calls, one looks it up."""
        if self._find is None:
            return False
        async with self._finding:
            if self._settings.url == url:
                found, key = await in_thread(self._find)
                self._settings.move(found, key)
        return self._settings.url != url


async def drive_async(http: httpx2.AsyncClient, steps: Generator[Action, Reply, T]) -> T:
    """Carry out the actions that an exchange yields, and return its result; see `palestra.client.client.drive`.

    Args:
        http: the client to send requests with.
        steps: generator of `exchange`, which yields requests to send and pauses to make.
    """
    reply: Reply = None
    try:
        while True:
            action = steps.send(reply)
            if isinstance(action, float):
                await asyncio.sleep(action)
                reply = None
                continue
            try:
                reply = await http.request(**action)
            except httpx2.RequestError as error:
                reply = error
    except StopIteration as end:
        result: T = end.value
        return result
