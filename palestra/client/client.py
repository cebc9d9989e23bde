"""The client of a data plane, for scripts (`Client`) and for event loops (`AsyncClient`)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self

import httpx2

from palestra.client.episode import Episode
from palestra.client.exchange import Reply, Settings, exchange
from palestra.client.protocol import (
    Call,
    abort_call,
    claim_call,
    end_call,
    heartbeat_call,
    push_calls,
    read_claim,
)
from palestra.errors import ClaimOver, InvalidRequest, JobOver
from palestra.threads import in_thread

_Reward = float | Mapping[str, float]
Find = Callable[[], tuple[str, str]]  # returns a data plane's URL and key, now; it may block, and raises JobOver
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)


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
        reward: _Reward,
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
        """Renew the lease; needed only while an episode makes no other call for long."""
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
        try:
            yield episode
        except BaseException as error:
            if episode is not None:
                await self.abort_episode(episode, f"{type(error).__name__}: {error}")
            raise
        if episode is not None:
            await self.end_episode(episode, _reward_of(episode), metadata=episode.metadata)

    async def _send(self, call: Call) -> Any:
        steps = exchange(self._settings, call)
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
                    reply = await self._http.post(**action)
                except httpx2.TransportError as error:
                    reply = error
                    if await self._has_moved(url):
                        steps, reply = exchange(self._settings, call), None
        except StopIteration as end:
            return end.value

    async def _has_moved(self, url: str) -> bool:
        """Whether the server is somewhere else than at `url` now. Many calls may ask, one finds it out."""
        if self._find is None:
            return False
        async with self._finding:
            if self._settings.url == url:
                found, key = await in_thread(self._find)
                self._settings.url, self._settings.key = found.rstrip("/"), key
        return self._settings.url != url


class Client:
    """Synchronous client; safe to share between threads. Keeps the leases of its episodes alive in the background."""

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
            retry_seconds: how long to try when the server can't be reached, for instance while it restarts.

        Raises:
            ConfigError: no key.
        """
        self._settings = Settings(url, api_key, worker_id, retry_seconds)
        self._http = httpx2.Client(limits=_LIMITS)
        self._live: dict[str, Episode] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and stop the heartbeats."""
        self._stop.set()
        if self._heart is not None:
            self._heart.join()
        self._http.close()

    def begin_episode(self, *, allow_discard_timeout: float | None = None) -> Episode | None:
        """Claim the next episode, waiting for one; None when the job is over.

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
            if episode is not None:
                self._keep_alive(episode)
            if episode is not None or finished:
                return episode

    def end_episode(
        self,
        episode: Episode,
        reward: _Reward,
        *,
        step_rewards: Sequence[float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Hand in the reward (or rewards by agent). When it returns, it is on the server's disk.

        Raises:
            Conflict: the episode was given to another worker, or ended before with another reward.
            InvalidRequest: the reward is not a finite number.
        """
        self._forget(episode)
        self._send(end_call(episode, reward, step_rewards, metadata))

    def abort_episode(self, episode: Episode, reason: str = "", *, discard: bool = False) -> None:
        """Give the episode back without a reward: something failed that is not the policy's doing."""
        self._forget(episode)
        self._send(abort_call(episode, reason, discard))

    def push_tasks(self, train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]] = ()) -> None:
        """Give the job its tasks, all at once; the same again changes nothing. A key `id` names a task."""
        for call in push_calls({"validation": validation, "train": train}):
            self._send(call)

    @contextmanager
    def episode(self) -> Iterator[Episode | None]:
        """Claim an episode for a `with` block; set `episode.reward` inside it. An exception gives it back.

        None when the job is over.
        """
        episode = self.begin_episode()
        try:
            yield episode
        except BaseException as error:
            if episode is not None:
                self.abort_episode(episode, f"{type(error).__name__}: {error}")
            raise
        if episode is not None:
            self.end_episode(episode, _reward_of(episode), metadata=episode.metadata)

    def _keep_alive(self, episode: Episode) -> None:
        with self._lock:
            self._live[episode.episode_id] = episode
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat, name="palestra-heartbeat", daemon=True)
                self._heart.start()

    def _forget(self, episode: Episode) -> None:
        with self._lock:
            self._live.pop(episode.episode_id, None)

    def _beat(self) -> None:
        """Renew all leases three times a period. One that is lost is dropped: its next call says what happened."""
        pause = 1.0
        while not self._stop.wait(pause):
            with self._lock:
                live = list(self._live.values())
            pause = max(0.1, min((e.lease_seconds for e in live), default=3.0) / 3)
            for episode in live:
                call = heartbeat_call(episode)
                try:
                    response = self._http.post(**self._settings.request(call))
                except (
                    httpx2.TransportError,
                    RuntimeError,
                ):  # not reachable now; tried again at the next beat
                    continue
                if response.status_code in (404, 409):
                    self._forget(episode)

    def _send(self, call: Call) -> Any:
        steps = exchange(self._settings, call)
        reply: Reply = None
        try:
            while True:
                action = steps.send(reply)
                if isinstance(action, float):
                    time.sleep(action)
                    reply = None
                    continue
                try:
                    reply = self._http.post(**action)
                except httpx2.TransportError as error:
                    reply = error
        except StopIteration as end:
            return end.value


def _reward_of(episode: Episode) -> _Reward:
    if episode.reward is None:
        raise InvalidRequest(f"episode {episode.episode_id}: set episode.reward before the block ends", "reward")
    return episode.reward
