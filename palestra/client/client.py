"""The client of a data plane, for scripts (`Client`) and for event loops (`AsyncClient`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from palestra.client.episode import Episode
from palestra.client.exchange import Action, Reply, Settings, send_call
from palestra.client.heartbeats import Heartbeats, renewed
from palestra.client.protocol import (
    Call,
    abort_call,
    claim_call,
    end_call,
    heartbeat_call,
    push_calls,
    read_claim,
)
from palestra.errors import ClaimOver, Conflict, InvalidRequest, JobOver, PalestraError
from palestra.threads import in_thread

log = logging.getLogger("palestra.client")
T = TypeVar("T")
Reward = float | Mapping[str, float]
Find = Callable[[], tuple[str, str]]  # returns a data plane's URL and key, now; it may block, and raises JobOver
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
GIVE_BACK_SECONDS = 5.0  # how long a block that failed tries to give its episode back; else the lease runs out


class AsyncClient:
    """Asynchronous client. Every call is safe to send again, and is, for up to `retry_seconds`."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        worker_id: str | None = None,
        retry_seconds: float = 300.0,
        find: Find | None = None,
    ) -> None:
        """As `Client`. `find` is asked again whenever the server can't be reached: it may be back somewhere else."""
        self._settings = Settings(url, api_key, worker_id, retry_seconds)
        self._http = httpx2.AsyncClient(limits=_LIMITS)
        self._find, self._finding = find, asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def begin_episode(self, *, allow_discard_timeout: float | None = None) -> Episode | None:
        """See `Client.begin_episode`."""
        while True:
            try:
                answer = await self._send(claim_call(self._settings.worker_id, allow_discard_timeout))
            except JobOver:
                return None
            except ClaimOver:
                continue
            episode, finished = read_claim(answer)
            if episode is not None or finished:
                return episode

    async def end_episode(
        self,
        episode: Episode,
        reward: Reward,
        *,
        step_rewards: Sequence[float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """See `Client.end_episode`."""
        await self._send(end_call(episode, reward, step_rewards, metadata))

    async def abort_episode(self, episode: Episode, reason: str = "", *, discard: bool = False) -> None:
        """See `Client.abort_episode`."""
        await self._send(abort_call(episode, reason, discard))

    async def heartbeat(self, episode: Episode) -> None:
        """See `Client.heartbeat`."""
        await self._send(heartbeat_call(episode))

    async def push_tasks(
        self, train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """See `Client.push_tasks`."""
        for call in push_calls({"validation": validation, "train": train}):
            await self._send(call)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode | None]:
        """See `Client.episode`."""
        episode = await self.begin_episode()
        if episode is None:
            yield None
            return
        try:
            async with renewed(self.heartbeat, episode):
                yield episode
                await self.end_episode(episode, _reward_of(episode), metadata=episode.metadata)
        except BaseException as error:
            try:
                await self._send(abort_call(episode, _reason(error), discard=False), GIVE_BACK_SECONDS)
            except PalestraError as problem:
                _not_given_back(episode, problem)
            raise

    async def _send(self, call: Call[Any], retry_seconds: float | None = None) -> Any:
        steps = send_call(self._settings, call, retry_seconds)
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
                    if await self._has_moved(url):
                        steps, reply = send_call(self._settings, call, retry_seconds), None
        except StopIteration as end:
            return end.value

    async def _has_moved(self, url: str) -> bool:
        """Whether the server is somewhere else than at `url` now. Many calls may ask, one finds it out."""
        if self._find is None:
            return False
        async with self._finding:
            if self._settings.url == url:
                found, key = await in_thread(self._find)
                self._settings.move(found, key)
        return self._settings.url != url


class Client:
    """Synchronous client; safe to share between threads.

    An episode belongs to the client that claimed it while its lease is renewed: by the server during each model call
    of the episode, by `with client.episode()` as long as the block is open, and by `heartbeat`. An episode of which
    nothing is heard for the time of its lease (`rollout.lease_seconds`) is given to another worker.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        worker_id: str | None = None,
        retry_seconds: float = 300.0,
    ) -> None:
        """Talk to the data plane at `url`.

        Args:
            url: as `palestra run` prints it, e.g. `http://127.0.0.1:7411`.
            api_key: the job's key; None: the environment variable PALESTRA_API_KEY.
            worker_id: a name to be recorded with each episode.
            retry_seconds: how long to try when the server can't be reached, for instance while it restarts. The first
                failure, and the server's return, are logged as warnings of the logger `palestra.client`.

        Raises:
            ConfigError: no key, or a URL that can be none of a data plane.
        """
        self._settings = Settings(url, api_key, worker_id, retry_seconds)
        self._http = httpx2.Client(limits=_LIMITS)
        self._heartbeats = Heartbeats(lambda episode: self._send(heartbeat_call(episode), retry_seconds=0.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and stop the heartbeats."""
        self._heartbeats.close()
        self._http.close()

    def begin_episode(self, *, allow_discard_timeout: float | None = None) -> Episode | None:
        """Claim the next episode, waiting for one; None when the job is over.

        Only the episode's own calls renew its lease then: prefer `with client.episode()`, or call `heartbeat` where
        more than the lease passes between two calls.

        Args:
            allow_discard_timeout: seconds without any sign of life after which the episode is given to another
                worker; None: the job's setting.

        Raises:
            Unauthorized: the key is not the job's.
            ConnectionLost: the server could not be reached for `retry_seconds`.
        """
        while True:
            try:
                answer = self._send(claim_call(self._settings.worker_id, allow_discard_timeout))
            except ClaimOver:
                continue
            episode, finished = read_claim(answer)
            if episode is not None or finished:
                return episode

    def end_episode(
        self,
        episode: Episode,
        reward: Reward,
        *,
        step_rewards: Sequence[float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Hand in the reward (or rewards by agent). When it returns, it is on the server's disk.

        Raises:
            Conflict: the episode was given to another worker, or ended before with another reward.
            InvalidRequest: the reward is not a finite number.
        """
        self._send(end_call(episode, reward, step_rewards, metadata))

    def abort_episode(self, episode: Episode, reason: str = "", *, discard: bool = False) -> None:
        """Give the episode back without a reward: something failed that is not the policy's doing."""
        self._send(abort_call(episode, reason, discard))

    def heartbeat(self, episode: Episode) -> None:
        """Renew the lease; needed only outside of a `with` block, where an episode makes no call for long.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the episode is not this client's any more.
        """
        self._send(heartbeat_call(episode))

    def push_tasks(self, train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]] = ()) -> None:
        """Give the job its tasks, all at once; the same again changes nothing. A key `id` names a task."""
        for call in push_calls({"validation": validation, "train": train}):
            self._send(call)

    @contextmanager
    def episode(self) -> Iterator[Episode | None]:
        """Claim an episode for a `with` block; set `episode.reward` inside it. None when the job is over.

        The lease is renewed as long as the block is open. Its end hands in the reward; an exception, KeyboardInterrupt
        and SystemExit too, gives the episode back for another attempt, and goes on.

        Raises:
            InvalidRequest: the block has ended without a reward; the episode was given back.
        """
        episode = self.begin_episode()
        if episode is None:
            yield None
            return
        try:
            with self._heartbeats.of(episode):
                yield episode
                self.end_episode(episode, _reward_of(episode), metadata=episode.metadata)
        except BaseException as error:
            try:
                self._send(abort_call(episode, _reason(error), discard=False), GIVE_BACK_SECONDS)
            except PalestraError as problem:
                _not_given_back(episode, problem)
            raise

    def _send(self, call: Call[Any], retry_seconds: float | None = None) -> Any:
        return drive(self._http, send_call(self._settings, call, retry_seconds))


def drive(http: httpx2.Client, steps: Generator[Action, Reply, T]) -> T:
    """Do what an exchange says, and return its result."""
    reply: Reply = None
    try:
        while True:
            action = steps.send(reply)
            if isinstance(action, float):
                time.sleep(action)
                reply = None
                continue
            try:
                reply = http.request(**action)
            except httpx2.RequestError as error:
                reply = error
    except StopIteration as end:
        result: T = end.value
        return result


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _not_given_back(episode: Episode, problem: PalestraError) -> None:
    """Only said: what the block raised is what its user has to see, and the lease ends by itself."""
    if isinstance(problem, Conflict):
        log.info("episode %s is not this client's any more: %s", episode.episode_id, problem)
    else:
        log.warning("episode %s was not given back, its lease runs out instead: %s", episode.episode_id, problem)


def _reward_of(episode: Episode) -> Reward:
    if episode.reward is None:
        raise InvalidRequest(f"episode {episode.episode_id}: set episode.reward before the block ends", "reward")
    return episode.reward
