"""`SeatEnvironment`: a seat of another job's episodes, played and learned from like an environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from copy import copy
from typing import Any

from palestra.client.async_client import AsyncClient
from palestra.client.exchange import checked_key, checked_url
from palestra.client.plain_values import checked_amount
from palestra.client.seat import AsyncSeat
from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.errors import ConfigError, ConnectionLost, EnvironmentFailed, JobOver, RolloutFailed
from palestra.threads import in_thread
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage, Observation
from palestra.types.states import SEAT_LOST
from palestra_control.control import data_plane_of

KEY_VARIABLE = "PALESTRA_SEAT_KEY"
RETRY_SECONDS = 300.0


class _OtherJob:
    """The job whose seat is played, and one client of it for all environments of a process."""

    def __init__(self, role: str, url: str | None, key: str | None, job: str | None, retry_seconds: float) -> None:
        self.where = url or f"job {job}"
        self._role, self._url, self._key, self._job, self._retry_seconds = role, url, key, job, retry_seconds
        self._client: AsyncClient | None = None
        self._users = 0
        self._opening = asyncio.Lock()

    async def open(self) -> AsyncClient:
        """Return the client, for an environment that will `leave` it; wait until a service's job runs."""
        if not self._users:
            self._opening = asyncio.Lock()  # an earlier one may be of another event loop
        self._users += 1
        try:
            async with self._opening:
                self._client = self._client or await self._connected()
        except BaseException:
            self._users -= 1
            raise
        return self._client

    async def leave(self) -> None:
        """Close the client if no environment is left."""
        self._users -= 1
        if not self._users and self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _connected(self) -> AsyncClient:
        find = None if self._job is None else data_plane_of(self._job)
        url, key = (self._url, self._key) if find is None else await in_thread(find)
        assert url is not None
        # A worker holds one seat of an episode, so two seats of a game have two names.
        name = f"{self._role}-{os.uname().nodename}-{os.getpid()}"
        return AsyncClient(url, key, worker_id=name, retry_seconds=self._retry_seconds, find=find)


class SeatEnvironment(ConcurrentEnvironment):
    """A seat of another job's episodes, as the environment of this job: its policy plays the seat, and is trained here.

    The other job runs the game and trains the policies of its other roles. Each episode of this job is one game of the
    other: the policy's calls are recorded here, and the seat's reward is the episode's. The task has no effect.

    Pass it to `palestra.train`, or name it to `palestra worker`: calling it returns another one, for each episode. If
    the other job is restarted or loses the game, the attempt fails without a reward and another game is claimed. When
    the other job is over, this one ends with JobOver, and can be resumed with another.
    """

    reusable = True
    gives_choices = True  # where the game has them
    has_other_players = True

    def __init__(
        self,
        role: str,
        url: str | None = None,
        key: str | None = None,
        *,
        job: str | None = None,
        retry_seconds: float = RETRY_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """Store whose seat is played; `setup` makes a client of that job.

        Args:
            role: the seat, one of the other job's `seats.roles`. The agent has this name here, too.
            url: of the other job's data plane, such as `http://10.0.0.7:7411`.
            key: of the seat (`palestra seat-key`), or of the other job; None: the variable `PALESTRA_SEAT_KEY`. It is
                only sent to the other job.
            job: id of the other job in a service, in place of `url` and `key`; `PALESTRA_URL` and `PALESTRA_KEY` are
                the service's address and your key. Waits until that job runs.
            retry_seconds: how long to retry while the other job cannot be reached.
            clock: source of observation times; None: the system's clock.

        Raises:
            ConfigError: not exactly one of `url` and `job` is given; the URL is invalid, or there is no key.
        """
        super().__init__(clock)
        if (url is None) == (job is None):
            raise ConfigError("a seat is of a job: give the `url` of its data plane, or `job`, its id in a service")
        if job is not None and key is not None:
            raise ConfigError("`key` is of a data plane's `url`; a service gives the key of its `job`")
        if url is not None:
            url = checked_url(url, "http://127.0.0.1:7411")
            # Not PALESTRA_API_KEY: in a worker that is the key of its own job, which is not for the other one.
            if not (key := key or os.environ.get(KEY_VARIABLE)):
                raise ConfigError(f"no key of the seat: pass key=… or set {KEY_VARIABLE} (palestra seat-key prints it)")
            key = checked_key(key)
        self.roles = (role,)
        self._role = role
        self._other = _OtherJob(role, url, key, job, checked_amount("retry_seconds", retry_seconds, endless=True))
        self._client: AsyncClient | None = None
        self._answer: asyncio.Future[ChatMessage] | None = None  # of the observation that is shown
        self._acted_on: dict[str, str] = {}  # by agent: its last observation
        self._paid = 0.0  # what the seat itself has earned so far

    def __call__(self) -> SeatEnvironment:
        """Return another environment of the same seat, for an episode at the same time."""
        made = copy(self)
        made._client, made.calls = None, []
        made._clear()
        return made

    async def setup(self) -> None:
        """Make a client of the other job; wait until it runs if it is a service's.

        Raises:
            NotFound: the service has no such job, or your key may not see it.
            JobOver: the job has ended.
        """
        self._client = await self._other.open()

    async def close(self) -> None:
        """Give the seat back, and leave the client."""
        await self.abandon()
        if self._client is not None:
            self._client = None
            await self._other.leave()

    async def start(self, task: Mapping[str, Any]) -> None:
        """Begin to play one game of the other job."""
        self._answer, self._acted_on, self._paid = None, {}, 0.0
        self._work("the seat", self._play_game)

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Pass an action on to the seat; the policy's thoughts stay in this job."""
        assert self._answer is not None
        self._answer.set_result(action.model_copy(update={"reasoning_content": None}))

    def cancel(self, observation_id: str) -> None:
        """Leave the seat, because no action will come: the other job decides what happens to it."""
        if observation_id in self._open and self._answer is not None:
            error = f"{self._open[observation_id].agent!r} gave no answer to an observation of the seat {self._role!r}"
            self._answer.set_exception(EnvironmentFailed(error))
        super().cancel(observation_id)

    def waits_only_for(self, observation_id: str) -> bool:
        """Return whether the game is blocked until this observation is answered, as far as this player knows."""
        return observation_id in self._open and not self._unseen

    async def _play_game(self) -> None:
        """Claim a seat and play it to the end; claim again if it is lost before this player was asked anything."""
        client = self._client
        assert client is not None, "`setup` was called"
        where = self._other.where
        try:
            while not self._acted_on:
                async with client.seat(self._role) as seat:
                    if seat is None:
                        raise JobOver(f"{where} is over, so nobody plays against its seat {self._role!r} any more")
                    await self._play(seat)
                if seat.over:
                    self._end(seat)
                    return
        except ConnectionLost as error:  # which would be this job's own engine otherwise
            raise EnvironmentFailed(str(error)) from error
        raise RolloutFailed(SEAT_LOST, f"{where} has taken back the seat {self._role!r}, or its game")

    async def _play(self, seat: AsyncSeat) -> None:
        """Show the observations of a claimed seat and return its policy's actions, until the game is over or lost."""
        async for asked in seat:
            agent, reward = asked.agent, asked.reward if isinstance(asked.reward, float) else None
            if agent == self._role:
                self._paid += reward or 0.0
            new = agent not in self._acted_on
            before = seat.history.get(agent, ()) if new else ()  # of a worker that has left this game
            self._answer = asyncio.get_running_loop().create_future()
            shown = self.emit(
                agent,
                (*before, *asked.content),
                parents=self._last_of(agent),
                tools=asked.tools,
                choices=asked.choices,
                reward=reward,
                info=_game(seat) if not self._acted_on else None,
            )
            self._acted_on[agent] = shown.id
            # False after a time limit: the other job has done what it does then, and the next observation shows it.
            await seat.act(await self._answer)

    def _end(self, seat: AsyncSeat) -> None:
        """Pay what the other job's record has, and its observations had not: usually the whole reward."""
        self.emit(
            self._role,
            seat.last,
            parents=self._last_of(self._role),
            reward=(seat.reward or 0.0) - self._paid,  # an agent that a game pays nothing has earned nothing
            terminated=not seat.truncated,
            truncated=seat.truncated,
            info=None if self._acted_on else _game(seat),
        )

    def _last_of(self, agent: str) -> tuple[str, ...]:
        """Return the last observation of an agent, whose action a reward is for."""
        return (self._acted_on[agent],) if agent in self._acted_on else ()


def _game(seat: AsyncSeat) -> dict[str, str]:
    """Return which game of the other job is played, for people."""
    return {"episode": seat.episode.episode_id, "kind": seat.episode.kind}
