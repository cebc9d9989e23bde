"""`SessionTable`: the sessions of a server: how many there are, who waits for one, and when one ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from palestra.envs import Environment
from palestra.errors import EnvironmentFailed, PalestraError, ServerStopping, TooManyRequests
from palestra.types.clock import Clock, SystemClock
from palestra_remote.session import EnvironmentSession, Made, Send, SessionLimits, error_line
from palestra_remote.wire import PROTOCOL, EnvironmentFacts, SessionList

CLOSE_SECONDS = 5.0  # for sessions to end with their server; an environment that does not close is left behind


class SessionTable:
    """Creates sessions for clients, at most `limits.sessions` at a time, first come, first served.

    While clients wait, a session without a running episode ends; its client gets a new one for its next episode.
    """

    def __init__(
        self, make: Callable[[], Made], limits: SessionLimits | None = None, clock: Clock | None = None
    ) -> None:
        self.limits = limits or SessionLimits()
        self._make, self._clock = make, clock or SystemClock()
        self.facts = _facts(make())
        self._sessions: set[EnvironmentSession] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = 0  # places of sessions, also of those that are being opened or closed
        self._opened = 0
        self._closed: str | None = None  # why there are no new sessions; None: there may be
        self._empty = asyncio.Event()  # set while there is no session, once the table drains

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    def list(self) -> SessionList:
        """Return all sessions, for people."""
        return SessionList(
            environment=self.facts.name,
            limit=self.limits.sessions,
            waiting=len(self._waiting),
            draining=self._closed is not None,
            opened=self._opened,
            sessions=tuple(session.line() for session in self._sessions),
        )

    @asynccontextmanager
    async def session(
        self, system: str | None, wait_seconds: float | None, send: Send
    ) -> AsyncIterator[EnvironmentSession]:
        """Provide a new session inside the block; wait for one while all are in use.

        Args:
            system: system message of the agent of a single-agent environment; None: the environment's own.
            wait_seconds: None: without a limit.

        Raises:
            TooManyRequests: no session became free in time.
            ServerStopping: the server ends.
        """
        await self._take_place(wait_seconds)
        session = EnvironmentSession(self._make, system, self.limits, self._clock, send, self._free_capacity)
        try:
            await self._set_up(session)
            self._opened += 1
            self._sessions.add(session)
            yield session
        finally:
            try:
                await session.close()
            finally:
                self._sessions.discard(session)
                self._leave_place()

    def check_open(self) -> None:
        """Raise an error if new sessions are refused. Raises ServerStopping if the server ends."""
        if self._closed is not None:
            raise ServerStopping(self._closed)

    async def drain(self, seconds: float) -> bool:
        """Refuse new sessions, and wait until all episodes are over; return whether all sessions ended in time.

        Sessions end between two episodes; clients begin their next one at another server.
        """
        self._refuse("this environment server is draining: it ends, and takes no new sessions")
        self._free_capacity()
        self._look_empty()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        return self._empty.is_set()

    def stop(self) -> None:
        """Refuse new sessions and end the present ones."""
        self._refuse("this server is going down")
        for session in self._sessions:
            session.ended.set()
        self._look_empty()

    async def close(self) -> None:
        """End all sessions, and wait for it."""
        self.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._empty.wait()

    async def _set_up(self, session: EnvironmentSession) -> None:
        try:
            async with asyncio.timeout(self.limits.hang_seconds):
                await session.open()
        except PalestraError:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"the environment could not be made: {error_line(error)}") from error

    def _refuse(self, reason: str) -> None:
        """Refuse new sessions from now on, waiting clients included."""
        self._closed = reason
        for place in self._waiting:
            place.cancel()
        self._waiting.clear()

    def _look_empty(self) -> None:
        if self._closed is not None and self._taken == 0:
            self._empty.set()

    def _leave_place(self) -> None:
        """Pass a place to the client that has waited longest."""
        self._taken -= 1
        self._grant()
        self._look_empty()

    async def _take_place(self, seconds: float | None) -> None:
        """Wait for a free place, first come, first served."""
        self.check_open()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._grant()
        self._free_capacity()
        try:
            await asyncio.wait((place,), timeout=seconds)
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # leave the place to the next
                self._leave_place()
            raise
        finally:
            if not place.done():
                self._waiting.remove(place)
        if place.cancelled():
            self.check_open()
        if not place.done():
            raise TooManyRequests(
                f"all sessions of this server are in use, and none has become free in {seconds:g} s; "
                "play fewer episodes at the same time, or let its operator allow more"
            )

    def _grant(self) -> None:
        while self._waiting and self._taken < self.limits.sessions:
            self._waiting.popleft().set_result(None)
            self._taken += 1

    def _free_capacity(self) -> None:
        """End the longest idle sessions, one for each waiting client; all idle ones while the table drains."""
        ending = sum(session.ended.is_set() for session in self._sessions)
        wanted = len(self._sessions) if self._closed is not None else len(self._waiting) - ending
        if wanted > 0:
            idle = [session for session in self._sessions if session.is_idle and not session.ended.is_set()]
            for session in sorted(idle, key=lambda session: session.asked_at)[:wanted]:
                session.ended.set()


def _facts(made: Any) -> EnvironmentFacts:
    serial = isinstance(made, Environment)
    return EnvironmentFacts(
        name=type(made).__name__,
        protocol=PROTOCOL,
        roles=() if serial else tuple(made.roles),
        gives_choices=False if serial else made.gives_choices,
        moves=() if serial else tuple(made.moves),
        max_steps=made.max_steps,
        forfeit_reward=made.forfeit_reward,
        time_limited=tuple(getattr(made, "time_limits", ())),
    )
