"""`SessionTable`: the sessions of a server: how many there are, who waits for one, and when one ends."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from palestra.env_server.session import EnvironmentSession, Made, SessionLimits
from palestra.envs import Environment
from palestra.errors import (
    EnvironmentFailed,
    NotFound,
    PalestraError,
    ProtocolMismatch,
    ServerStopping,
    Unauthorized,
    place_of,
)
from palestra.types.clock import Clock, SystemClock
from palestra.types.env_wire import (
    MAX_WAIT_SECONDS,
    PROTOCOLS,
    CreateSession,
    EnvironmentFacts,
    SessionAnswer,
    SessionCreated,
    SessionList,
)

log = logging.getLogger("palestra.env_server")
SWEEP_SECONDS = 1.0


class SessionTable:
    """Makes sessions for clients, at most `limits.sessions` at a time, and ends those whose clients are gone.

    Who waits longest for a session gets the next one. While clients wait, a session in which no episode is being played
    ends; its client gets another one when it begins its next episode.
    """

    def __init__(
        self, make: Callable[[], Made], limits: SessionLimits | None = None, clock: Clock | None = None
    ) -> None:
        """Create a table without sessions.

        Args:
            limits: of sessions; None: the defaults.
            clock: source of time; None: the system's.

        Raises:
            Exception: what the environment raised when it was made.
        """
        self.limits = limits or SessionLimits()
        self._make, self._clock = make, clock or SystemClock()
        self.facts = _facts(make())
        self._sessions: dict[str, EnvironmentSession] = {}
        self._by_request: dict[str, asyncio.Future[EnvironmentSession | None]] = {}
        self._requests: dict[str, str] = {}  # session -> the request that made it
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = 0  # places of sessions, also of those that are being opened or closed
        self._opened = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._closed: str | None = None  # why there are no new sessions; None: there may be
        self._empty = asyncio.Event()  # set while there is no session, once the table drains

    def __len__(self) -> int:
        """Return how many sessions there are."""
        return len(self._sessions)

    def list(self) -> SessionList:
        """Return all sessions, for people."""
        return SessionList(
            environment=self.facts.name,
            limit=self.limits.sessions,
            waiting=len(self._waiting),
            draining=self._closed is not None,
            opened=self._opened,
            sessions=tuple(session.line() for session in self._sessions.values()),
        )

    def session(self, session_id: str, key: str) -> EnvironmentSession:
        """Return a session.

        Args:
            key: the session's key, as the client has sent it.

        Raises:
            NotFound: there is no such session, or it has ended.
            Unauthorized: the key opens something else.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"there is no session {session_id!r:.60}; it has ended, or the server was started again")
        if not hmac.compare_digest(key.encode(), session.key.encode()):
            raise Unauthorized("no key, or one that opens something else; a session has a key of its own")
        return session

    async def create(self, request: CreateSession) -> SessionAnswer:
        """Return a new session, or the one that the same request has made before, or that all are in use.

        Raises:
            ProtocolMismatch: the client speaks no version that this server speaks.
            EnvironmentFailed: the environment could not be made.
        """
        common = set(request.protocols) & set(PROTOCOLS)
        if not common:
            raise ProtocolMismatch(
                f"this server speaks version {_listed(PROTOCOLS)} of the environment protocol, and the client "
                f"{_listed(request.protocols)}",
                "protocols",
            )
        opening = self._by_request.get(request.request_id)
        if opening is None:
            opening = asyncio.ensure_future(self._open(request))
            self._by_request[request.request_id] = opening
            opening.add_done_callback(partial(_forget_unmade, self._by_request, request.request_id))
        session = await asyncio.shield(opening)
        if session is None:
            return SessionAnswer(status="waiting")
        created = SessionCreated(
            session_id=session.session_id,
            key=session.key,
            protocol=max(common),
            lease_seconds=self.limits.lease_seconds,
            max_message_bytes=self.limits.max_message_bytes,
            environment=self.facts,
        )
        return SessionAnswer(status="created", session=created)

    async def sweep(self) -> None:
        """End the sessions whose clients are gone, and fail episodes whose environments hang, until cancelled."""
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self.limits.lease_seconds / 4, self.limits.hang_seconds / 4))
            now = self._clock.monotonic()
            for session in list(self._sessions.values()):
                if now - session.heard_at > self.limits.lease_seconds:
                    log.info("session %s: no word of its client for %g s", session.session_id, now - session.heard_at)
                    self.end(session)
                elif now - session.asked_at > self.limits.idle_seconds:
                    log.info("session %s: idle for %g s", session.session_id, now - session.asked_at)
                    self.end(session)
                else:
                    session.check_hanging()

    def end(self, session: EnvironmentSession) -> None:
        """End a session; when its environment is closed, the client that has waited longest gets its place."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        self._by_request.pop(self._requests.pop(session.session_id), None)
        task = asyncio.ensure_future(self._close(session))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def drain(self, seconds: float) -> bool:
        """Make no more sessions, and wait until the episodes that are being played are over.

        A session ends between two episodes; its client begins the next one in a session of another server.

        Args:
            seconds: the longest time to wait.

        Returns:
            Whether all sessions have ended; False: the time is over, and episodes are still being played.
        """
        self._refuse("this environment server is draining: it ends, and takes no new sessions")
        for session in list(self._sessions.values()):
            if session.is_idle:
                self.end(session)
        self._look_empty()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        return self._empty.is_set()

    async def close(self) -> None:
        """End all sessions, and make no more."""
        self._refuse("this server is going down")
        for session in list(self._sessions.values()):
            self.end(session)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _open(self, request: CreateSession) -> EnvironmentSession | None:
        """Wait for a place, make a session and set its environment up; None: no place has become free in time."""
        if not await self._take_place(min(request.wait_seconds, MAX_WAIT_SECONDS)):
            return None
        session = EnvironmentSession(
            self._make, request.system, self.limits, self._clock, on_idle=self._make_room, on_end=self.end
        )
        try:
            async with asyncio.timeout(self.limits.hang_seconds):
                await session.open()
        except BaseException as error:
            await self._close(session)
            if isinstance(error, PalestraError) or not isinstance(error, Exception):
                raise
            said = f"{type(error).__name__}: {error}{place_of(error)}"
            raise EnvironmentFailed(f"the environment could not be made: {said}") from error
        self._opened += 1
        self._sessions[session.session_id] = session
        self._requests[session.session_id] = request.request_id
        return session

    def _check_open(self) -> None:
        """Refuse a new session if there may be none any more."""
        if self._closed is not None:
            raise ServerStopping(self._closed)

    def _refuse(self, reason: str) -> None:
        """Refuse new sessions from now on, also to those who wait for one."""
        self._closed = reason
        for place in self._waiting:
            place.cancel()
        self._waiting.clear()

    def _look_empty(self) -> None:
        if self._closed is not None and self._taken == 0:
            self._empty.set()

    async def _close(self, session: EnvironmentSession) -> None:
        """Close a session and give its place to the client that has waited longest."""
        try:
            await session.close()
        finally:
            self._taken -= 1
            self._grant()
            self._look_empty()

    async def _take_place(self, seconds: float) -> bool:
        """Wait until there may be one session more, in the order in which clients have come; False: there is none."""
        self._check_open()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._grant()
        self._make_room()
        try:
            await asyncio.wait((place,), timeout=seconds)
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # leave the place to the next
                self._taken -= 1
                self._grant()
            raise
        finally:
            if not place.done():
                self._waiting.remove(place)
        if place.cancelled():
            self._check_open()
        return place.done()

    def _grant(self) -> None:
        """Give free places to those that wait longest."""
        while self._waiting and self._taken < self.limits.sessions:
            self._waiting.popleft().set_result(None)
            self._taken += 1

    def _make_room(self) -> None:
        """End the sessions that have been without an episode for longest, as many as clients wait for a place.

        While the table drains, all of them end.
        """
        wanted = len(self._sessions) if self._closed is not None else len(self._waiting) - len(self._ending)
        if wanted > 0:
            idle = sorted((s for s in self._sessions.values() if s.is_idle), key=lambda session: session.asked_at)
            for session in idle[:wanted]:
                self.end(session)


def _forget_unmade(
    requests: dict[str, asyncio.Future[EnvironmentSession | None]],
    request_id: str,
    done: asyncio.Future[EnvironmentSession | None],
) -> None:
    """Let a request that has brought no session be tried again under its name."""
    if done.cancelled() or done.exception() is not None or done.result() is None:
        requests.pop(request_id, None)


def _facts(made: Any) -> EnvironmentFacts:
    serial = isinstance(made, Environment)
    return EnvironmentFacts(
        name=type(made).__name__,
        protocols=PROTOCOLS,
        roles=() if serial else tuple(made.roles),
        gives_choices=False if serial else made.gives_choices,
        moves=() if serial else tuple(made.moves),
        max_steps=made.max_steps,
        forfeit_reward=made.forfeit_reward,
        time_limited=tuple(getattr(made, "time_limits", ())),
    )


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
