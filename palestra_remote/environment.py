"""`RemoteEnvironment`: an environment that another machine serves, played like one of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from palestra.client.plain_values import checked_amount
from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.errors import EnvironmentFailed, PalestraError
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage, Observation
from palestra_remote.link import RemoteSessionEnded, ServerAddress, SessionLink, open_link, server_error
from palestra_remote.observations import observation_of
from palestra_remote.wire import (
    MOST_WAITING,
    Abandoned,
    Begun,
    EnvironmentFacts,
    Observed,
    Opened,
    Over,
    ServerMessage,
    SessionFailed,
    Withdrawn,
)

RETRY_SECONDS, WAIT_SECONDS = 60.0, 600.0
ABANDON_SECONDS = 10.0  # for the server to answer that an episode has ended
ATTEMPTS = 3  # at the beginning of an episode, if sessions end meanwhile


def _fact(name: str) -> Any:
    """Return a property that is a fact of the environment, known when the server was asked."""
    return property(lambda self: getattr(self.facts, name), doc=EnvironmentFacts.model_fields[name].description)


class RemoteEnvironment(ConcurrentEnvironment):
    """An environment on a server started by `palestra env serve`, or any that speaks the environment protocol.

    Pass it to `palestra.train` or `check_environment`: calling it returns another environment of the same server, one
    for each episode. Its session is reused for the next episode.

    If the connection is lost or the server is killed, the attempt fails without a reward and is retried; it is never
    the agent's loss. Between episodes the next one begins in a new session without a failed attempt.
    """

    reusable = True  # the server makes a new environment for each episode where it has to

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        system: str | None = None,
        retry_seconds: float = RETRY_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """Store the address of a server; `setup` begins a session.

        Args:
            url: the server's URL, such as `http://10.0.0.7:7500`.
            key: of the server; None: the variable `PALESTRA_ENVIRONMENT_KEY`.
            system: system message of the agent of an environment with one agent; None: the environment's own.
            retry_seconds: how long to retry while the server cannot be reached.
            wait_seconds: how long to wait while all of the server's sessions are in use.
            clock: source of observation times; None: the system's clock.

        Raises:
            ConfigError: the URL or a number is invalid, or there is no key.
        """
        super().__init__(clock)
        checked_amount("wait_seconds", wait_seconds, endless=True)
        self._address = ServerAddress(url, key, retry_seconds, wait_seconds)
        self._system = system
        self._facts: EnvironmentFacts | None = None
        self._link: SessionLink | None = None
        self._alone: set[str] = set()  # open observations until whose answer nothing can happen
        self._survivors: set[str] = set()  # open observations whose agent may fail
        self._pictures: set[str] = set()  # digests of those whose files this episode's messages had
        self._number = 0  # of the episode
        self._playing = False  # whether the server plays an episode of this environment, as far as is known

    def __call__(self) -> RemoteEnvironment:
        """Return another environment of the same server, with a session of its own."""
        address = self._address
        other = RemoteEnvironment(
            address.url,
            address.endpoint.key,
            system=self._system,
            retry_seconds=address.endpoint.retry_seconds,
            wait_seconds=address.wait_seconds,
            clock=self.clock,
        )
        other._facts = self._facts
        return other

    @property
    def facts(self) -> EnvironmentFacts:
        """Return the facts about the environment before an episode; asks the server if no session has told them.

        Raises:
            PalestraError: the server refuses the key, or cannot be reached.
        """
        if self._facts is None:
            self._facts = self._address.facts()
        return self._facts

    roles, gives_choices, moves, forfeit_reward = map(_fact, ("roles", "gives_choices", "moves", "forfeit_reward"))

    @property
    def time_limits(self) -> Mapping[str, None]:
        """Return the roles with time limits; their clock runs on the server, so they cannot be external players."""
        return dict.fromkeys(self.facts.time_limited)

    async def setup(self) -> None:
        """Begin a session; wait while all are in use.

        Raises:
            PalestraError: the server refuses the request, cannot be reached, or no session became free.
        """
        await self._connect()

    async def close(self) -> None:
        """End the episode and the session."""
        await super().abandon()
        link, self._link, self._playing = self._link, None, False
        if link is not None:
            await link.close()

    async def start(self, task: Mapping[str, Any]) -> None:
        """Begin an episode on the server, in a new session if the last one has ended."""
        self._alone, self._survivors, self._pictures = set(), set(), set()
        for attempt in range(1, ATTEMPTS + 1):
            link = self._link or await self._connect()
            self._number += 1
            try:
                await link.send(type="reset", episode=self._number, task=dict(task))
                self._playing = True
                while not isinstance(await self._next(link), Begun):
                    pass
            except RemoteSessionEnded:  # nothing of the episode has been seen, so it can begin in another session
                self._link = None
                await link.close()
                if attempt == ATTEMPTS:
                    raise
            else:
                self._work("the server", partial(self._listen, link))
                return

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Send an action to the server."""
        assert self._link is not None
        self._alone.discard(observation.id)
        self._survivors.discard(observation.id)
        await self._link.send(
            type="act",
            observation_id=observation.id,
            action=action.model_dump(mode="json", exclude_none=True),
        )

    def cancel(self, observation_id: str) -> None:
        """Give up on an observation, here and on the server."""
        was_open = observation_id in self._open
        super().cancel(observation_id)
        if was_open and self._link is not None:
            self._work(
                f"cancel {observation_id}", partial(self._link.send, type="cancel", observation_id=observation_id)
            )

    def waits_only_for(self, observation_id: str) -> bool:
        """Return whether the environment is blocked until this observation is answered."""
        return observation_id in self._alone

    def survives_failure(self, observation_id: str) -> bool:
        """Return whether the environment scores the failure of this observation's agent."""
        return observation_id in self._survivors and observation_id in self._open

    async def abandon(self) -> None:
        """End the episode, here and on the server, and wait until its work has stopped."""
        await super().abandon()
        if self._playing and self._link is not None:
            self._playing = False
            with contextlib.suppress(PalestraError, TimeoutError):  # the next message says what is wrong
                async with asyncio.timeout(ABANDON_SECONDS):
                    await self._link.send(type="abandon")
                    while not isinstance(await self._next(self._link), Abandoned):
                        pass

    async def _connect(self) -> SessionLink:
        self._link = link = await open_link(self._address, self._system)
        self._facts = link.opened.environment
        return link

    async def _next(self, link: SessionLink) -> ServerMessage:
        """Return the next message about this episode; drop those about earlier ones."""
        while True:
            message = await link.receive()
            if isinstance(message, Opened) or message.episode != self._number:
                continue
            if isinstance(message, SessionFailed):
                raise server_error(message)
            return message

    async def _listen(self, link: SessionLink) -> None:
        """Receive messages until the episode is over."""
        while not isinstance(event := await self._next(link), Over):
            if isinstance(event, Observed):
                self._show(event)
            elif isinstance(event, Withdrawn):
                self.withdraw(event.observation_id, event.action)
        self._playing = False
        self._open.clear()

    def _show(self, event: Observed) -> None:
        if max(len(self._open), len(self._unseen)) >= MOST_WAITING:
            raise EnvironmentFailed(f"{self._address.url} shows more than {MOST_WAITING:,} observations at a time")
        observation = observation_of(event, self.clock.now(), self._pictures)
        if not observation.is_last:
            self._open[observation.id] = observation
            if event.alone:
                self._alone.add(observation.id)
            if event.survives_failure:
                self._survivors.add(observation.id)
        self._unseen.append(observation)
        self._changed.set()
