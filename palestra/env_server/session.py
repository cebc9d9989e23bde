"""`EnvironmentSession`: one client's environment, and the messages between the two."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.envs.closing import close_or_log
from palestra.envs.remote.observations import message_of
from palestra.envs.remote.stream import MessageStream
from palestra.errors import (
    ConfigError,
    Conflict,
    EnvironmentFailed,
    EpisodeForfeited,
    EpisodeOver,
    InvalidEnvironment,
    InvalidRequest,
    PalestraError,
    place_of,
)
from palestra.types.clock import Clock
from palestra.types.env_wire import (
    FRAME_BYTES,
    LEAST_LEASE_SECONDS,
    MAX_MESSAGE_BYTES,
    MOST_MESSAGE_BYTES,
    Abandon,
    Act,
    Cancel,
    ClientFrame,
    Close,
    Reset,
    SessionLine,
)

log = logging.getLogger("palestra.env_server")
State = Literal["idle", "resetting", "playing", "over", "failed"]
Made = Environment | ConcurrentEnvironment
# Codes of errors that the environment did not raise on purpose: before the first observation, and after it.
RAISED, BROKEN = EnvironmentFailed("").code, EpisodeForfeited("").code


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """The limits of a server's sessions.

    Attributes:
        sessions: how many there may be at the same time; more wait.
        lease_seconds: a session ends after so long without a frame of its client.
        idle_seconds: a session ends after so long without a message but acknowledgements.
        hang_seconds: an episode fails if the environment, and not an agent, is silent for so long.
        close_seconds: the longest time that `close` of an environment may take.
        max_message_bytes: length of one message, in either direction.
    """

    sessions: int = 64
    lease_seconds: float = 60.0
    idle_seconds: float = 3600.0
    hang_seconds: float = 600.0
    close_seconds: float = 30.0
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        """Refuse what no client would take.

        Raises:
            ConfigError: a lease is too short, or a message may be too long.
        """
        if not self.lease_seconds >= LEAST_LEASE_SECONDS or not 1 <= self.max_message_bytes <= MOST_MESSAGE_BYTES:
            raise ConfigError(
                f"lease_seconds is at least {LEAST_LEASE_SECONDS:g}, and max_message_bytes at least 1 and at most "
                f"{MOST_MESSAGE_BYTES:,}"
            )

    @property
    def max_frame_bytes(self) -> int:
        """Return the length of a frame, which is cut before it would hold a second message of the largest size."""
        return self.max_message_bytes + FRAME_BYTES


class EnvironmentSession:
    """Plays the episodes of one client in an environment, and outlives the connections of that client.

    `receive` takes what the client sends, and `news` tells a connection that there may be something to send.

    Attributes:
        key: opens the session.
        stream: the messages of both sides.
        news: is set when there is a message to send, or the session or its connection has changed.
        connection: what carries the session now; None: there is no WebSocket.
        heard_at: monotonic seconds of the client's last frame.
        asked_at: monotonic seconds of the client's last message.
        ended: whether the session has ended.
    """

    def __init__(
        self,
        make: Callable[[], Made],
        system: str | None,
        limits: SessionLimits,
        clock: Clock,
        *,
        on_idle: Callable[[], None],
        on_end: Callable[[EnvironmentSession], None],
    ) -> None:
        """Create a session with a new name and a new key; `open` makes its environment.

        Args:
            system: system message of the agent of an `Environment`; None: the environment's own.
            on_idle: is called when the client has heard how its episode has ended.
            on_end: is called when the client has ended the session.
        """
        self.session_id, self.key = f"s{secrets.token_hex(12)}", f"es-{secrets.token_hex(20)}"
        self.stream = MessageStream(limits.max_message_bytes)
        self.news = asyncio.Event()
        self.connection: object | None = None
        self.ended = False
        self._make, self._system, self._limits, self._clock = make, system, limits, clock
        self._on_idle, self._on_end = on_idle, on_end
        self._begun_at = self.heard_at = self.asked_at = clock.monotonic()
        self._environment: ConcurrentEnvironment | None = None
        self._used = False  # whether the environment has had an episode
        self._state: State = "idle"
        self._open: set[str] = set()  # observations that wait for an action of the client
        self._episode: asyncio.Task[None] | None = None
        self._resetting = 0  # number of the message that began the episode
        self._moved_at = self._begun_at  # monotonic: of the last action or observation
        self._orders: asyncio.Queue[Reset | Abandon | Close] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._episodes = self._observations = self._actions = 0
        self._pictures: set[str] = set()  # digests of those whose files the episode's messages had

    async def open(self) -> None:
        """Make the environment and set it up.

        Raises:
            InvalidRequest: a system message is given, and the environment's agents have their own.
            Exception: what the environment raised.
        """
        await self._renew()
        self._worker = asyncio.create_task(self._obey())

    @property
    def is_idle(self) -> bool:
        """Return whether an episode was played, and none is, and the client knows how the last one has ended."""
        known = self.stream.acknowledged == self.stream.sent and self._orders.empty()
        return self._episodes > 0 and not self._plays and known

    @property
    def _plays(self) -> bool:
        return self._state in ("resetting", "playing")

    def line(self) -> SessionLine:
        """Return the session as the list of sessions shows it."""
        now = self._clock.monotonic()
        return SessionLine(
            session_id=self.session_id,
            state=self._state,
            connected=self.connection is not None,
            age_seconds=round(now - self._begun_at, 1),
            silent_seconds=round(now - self.heard_at, 1),
            episodes=self._episodes,
            observations=self._observations,
            actions=self._actions,
            open=len(self._open),
        )

    async def something_to_send(self) -> None:
        """Wait until a message waits for its acknowledgement, or the session has ended."""
        while self.stream.sent == self.stream.acknowledged and not self.ended:
            self.news.clear()
            await self.news.wait()

    def receive(self, frame: ClientFrame) -> None:
        """Handle the messages of a frame that have not been handled before.

        Raises:
            InvalidRequest: the frame does not continue the session's messages.
        """
        self.heard_at = self._clock.monotonic()
        self.stream.acknowledge(frame.ack)
        for message in self.stream.accept(frame.messages):
            self.asked_at = self.heard_at
            if isinstance(message, Act | Cancel):
                self._answer(message)
            else:
                self._orders.put_nowait(message)
        if self.is_idle:
            self._on_idle()

    async def close(self) -> None:
        """End the session at any point: stop its episode and close its environment."""
        self.ended = True
        self.news.set()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait((self._worker,))
        await self._discard()

    def _send(self, **message: Any) -> int:
        number = self.stream.add(message)
        self.news.set()
        return number

    def _fail(self, error: Exception, of: int | None) -> None:
        """Tell the client that a message, or the episode, has failed."""
        raised = BROKEN if self._state == "failed" and of is None else RAISED
        status, code = (error.http_status, error.code) if isinstance(error, PalestraError) else (500, raised)
        self._send(type="failed", of=of, status=status, code=code, message=_said(error))

    async def _obey(self) -> None:
        """Handle the client's orders, one after another, until the session is closed."""
        while True:
            order = await self._orders.get()
            await self._stop()
            if isinstance(order, Reset):
                self._state, self._resetting = "resetting", order.number
                # The player of the next episode has none of the files, and does not know which of them is damaged.
                self._pictures = set()
                self._moved_at = self._clock.monotonic()
                self._episodes += 1
                self._episode = asyncio.create_task(self._play(order))
                continue
            self._state = "idle"
            if isinstance(order, Close):
                await self._discard()
                self._send(type="done", of=order.number)
                self._on_end(self)
                return
            try:
                if self._environment is not None:
                    await self._environment.abandon()
                self._send(type="done", of=order.number)
            except Exception as error:  # noqa: BLE001 - the user's code
                self._fail(error, order.number)

    def _answer(self, message: Act | Cancel) -> None:
        """Pass an action on, or give up on an observation; the episode fails if that is not possible."""
        environment, name = self._environment, message.observation_id
        if environment is not None and environment.is_withdrawn(name):  # message and withdrawal have crossed
            return
        if environment is None or self._state != "playing":
            idle = Conflict(f"no episode is being played, so observation {name} waits for no action")
            self._fail(idle, message.number)
            return
        try:
            if isinstance(message, Act):
                self._actions += 1
                environment.act(name, message.action)
            else:
                environment.cancel(name)
        except Exception as error:  # noqa: BLE001 - the user's code
            self._fail(error, message.number)
        else:
            self._open.discard(name)
            self._moved_at = self.heard_at

    async def _play(self, order: Reset) -> None:
        """Reset the environment and send everything that it shows, until the episode is over or fails."""
        begun = False
        try:
            environment = await self._reset(order)
            self._state, begun = "playing", True
            self._send(type="done", of=order.number)
            await self._show_all(environment)
        except Exception as error:
            if not isinstance(error, PalestraError):
                log.warning("session %s: %s", self.session_id, _said(error), exc_info=error)
            self._state = "failed"
            self._open.clear()
            self._fail(error, None if begun else order.number)

    async def _reset(self, order: Reset) -> ConcurrentEnvironment:
        """Begin an episode in the environment, or in a new one if it is not reusable, and return the environment."""
        if self._environment is None or (self._used and not self._environment.reusable):
            await self._renew()
        assert self._environment is not None
        self._used = True
        await self._environment.reset(order.task)
        return self._environment

    async def _show_all(self, environment: ConcurrentEnvironment) -> None:
        """Send the observations of an episode until it is over."""
        while True:
            try:
                observation = await environment.observe()
            except EpisodeOver:
                self._withdraw(environment)
                self._state = "over"
                self._open.clear()
                self._send(type="over")
                return
            self._withdraw(environment)
            alone = environment.waits_only_for(observation.id)
            survives = environment.survives_failure(observation.id)
            encoded = message_of(observation, alone=alone, survives_failure=survives, sent=self._pictures)
            try:
                self._send(**encoded)
            except PalestraError as error:
                raise InvalidEnvironment(f"an observation of {observation.agent!r}: {error}") from error
            self._observations += 1
            self._moved_at = self._clock.monotonic()
            if not observation.is_last:
                self._open.add(observation.id)

    def _withdraw(self, environment: ConcurrentEnvironment) -> None:
        """Tell the client for which observations the environment no longer waits."""
        for name in [name for name in self._open if environment.is_withdrawn(name)]:
            self._open.discard(name)
            action = environment.action_in_place(name)
            shown = None if action is None else action.model_dump(mode="json", exclude_none=True)
            self._send(type="withdrawn", observation_id=name, action=shown)

    def check_hanging(self) -> None:
        """Fail the episode if the environment, and not an agent, has been silent for `hang_seconds`."""
        silent = self._clock.monotonic() - self._moved_at
        if self._episode is None or self._open or not self._plays or silent < self._limits.hang_seconds:
            return
        self._episode.cancel()
        seconds, resetting = f"after {self._limits.hang_seconds:g} s", self._state == "resetting"
        self._state = "failed"
        if resetting:
            self._fail(InvalidEnvironment(f"reset is not over, {seconds}"), self._resetting)
        else:
            self._fail(EpisodeForfeited(f"nothing was shown, and the episode is not over, {seconds}"), None)

    async def _stop(self) -> None:
        """Stop the episode that is being played, if there is one."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait((self._episode,))
            self._episode = None
        self._open.clear()

    async def _renew(self) -> None:
        """Close the environment, if there is one, and make a new one."""
        await self._close_environment()
        made = self._make()
        if isinstance(made, Environment):
            made = SerialEnvironment(made, system=self._system, clock=self._clock)
        elif self._system is not None:
            raise InvalidRequest("this environment's agents have their own system messages", "system")
        self._environment, self._used = made, False
        await made.setup()

    async def _discard(self) -> None:
        await self._stop()
        await self._close_environment()

    async def _close_environment(self) -> None:
        """Close the environment; an error is only logged, because its last episode is over and has its result."""
        environment, self._environment = self._environment, None
        if environment is not None:
            name = f"{type(environment).__name__} of session {self.session_id}"
            await close_or_log(environment, self._limits.close_seconds, log, name)


def _said(error: Exception) -> str:
    """Return an error as one line; one that was not raised on purpose is named with its type and place."""
    text = str(error) if isinstance(error, PalestraError) else f"{type(error).__name__}: {error}{place_of(error)}"
    return text.encode("utf-8", errors="replace").decode()[:2000]
