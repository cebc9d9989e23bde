"""`EnvironmentSession`: one client's environment, and the messages between the two."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.envs.concurrent import close_or_log
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
from palestra.waiting import ordinary_errors, race
from palestra_remote.observations import encoded, message_of
from palestra_remote.wire import (
    MAX_MESSAGE_BYTES,
    MOST_MESSAGE_BYTES,
    Abandon,
    Act,
    CancelObservation,
    ClientMessage,
    Open,
    Reset,
    SessionLine,
)

log = logging.getLogger("palestra.env_server")
State = Literal["idle", "resetting", "playing", "over", "failed"]
Made = Environment | ConcurrentEnvironment
Send = Callable[[str], Awaitable[None]]  # a text over the connection
WATCH_SECONDS = 1.0  # the longest time between two looks whether a session is idle or its environment hangs
# Codes of errors that the environment did not raise on purpose: before the first observation, and after it.
RAISED, BROKEN = EnvironmentFailed("").code, EpisodeForfeited("").code


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """The limits of a server's sessions.

    Attributes:
        sessions: at the same time; more wait.
        idle_seconds: time without a message of the client, after which a session ends.
        hang_seconds: an episode fails after so long without the environment's next step; time of agents does not count.
        max_message_bytes: of one message, in either direction.
    """

    sessions: int = 64
    idle_seconds: float = 3600.0
    hang_seconds: float = 600.0
    close_seconds: float = 30.0
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        """Raise ConfigError if clients would not accept messages of the maximum size."""
        if not 1 <= self.max_message_bytes <= MOST_MESSAGE_BYTES:
            raise ConfigError(f"max_message_bytes is at least 1 and at most {MOST_MESSAGE_BYTES:,}")


class HeldEnvironment:
    """One client's environment, which is made again for an episode where it can't be used a second time."""

    def __init__(
        self,
        make: Callable[[], Made],
        limits: SessionLimits,
        whose: str,
        system: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Hold no environment yet. `whose`: for the log. `system`: message of an `Environment`'s agent."""
        self._make, self._limits, self._whose, self._system, self._clock = make, limits, whose, system, clock
        self.present: ConcurrentEnvironment | None = None
        self._used = False  # whether the environment has had an episode

    async def renew(self) -> ConcurrentEnvironment:
        """Replace the environment. Raises InvalidRequest if its agents have own system messages, and one was given."""
        await self.close()
        made = self._make()
        if isinstance(made, Environment):
            made = SerialEnvironment(made, system=self._system, clock=self._clock)
        elif self._system is not None:
            raise InvalidRequest("this environment's agents have their own system messages", "system")
        self.present, self._used = made, False
        await made.setup()
        return made

    async def reset(self, task: Mapping[str, Any]) -> ConcurrentEnvironment:
        """Begin an episode in the environment, or in a new one if it is not reusable, and return the environment."""
        found = self.present
        if found is None or (self._used and not found.reusable):
            found = await self.renew()
        self._used = True
        await found.reset(task)
        return found

    async def close(self) -> None:
        """Close the environment; an error is only logged, because its last episode is over and has its result."""
        found, self.present = self.present, None
        if found is not None:
            await close_or_log(found, self._limits.close_seconds, log, f"{type(found).__name__} of {self._whose}")


class EnvironmentSession:
    """Plays the episodes of one client in an environment.

    Attributes:
        asked_at: monotonic seconds of the client's last message.
    """

    def __init__(
        self,
        make: Callable[[], Made],
        system: str | None,
        limits: SessionLimits,
        clock: Clock,
        send: Send,
        on_idle: Callable[[], None],
    ) -> None:
        """Create a session with a new name; `open` creates its environment. `system`: system message of an
        `Environment`'s agent; None: the environment's own. `on_idle`: called at the end of each episode.
        """
        self.session_id = f"s{secrets.token_hex(12)}"
        self.ended = asyncio.Event()
        self._held = HeldEnvironment(make, limits, f"session {self.session_id}", system, clock)
        self._limits, self._clock = limits, clock
        self._put, self._on_idle = send, on_idle
        self._begun_at = self.asked_at = clock.monotonic()
        self._state: State = "idle"
        self._open: set[str] = set()  # observations that wait for an action of the client
        self._number = 0  # of the episode, as the client counts
        self._episode: asyncio.Task[None] | None = None
        self._moved_at = self._begun_at  # monotonic: of the last action or observation
        self._episodes = self._observations = self._actions = 0
        self._pictures: set[str] = set()  # digests of those whose files the episode's messages had

    async def open(self) -> None:
        """Create the environment and set it up; see `HeldEnvironment.renew`."""
        await self._held.renew()

    @property
    def is_idle(self) -> bool:
        """Return whether the session has played an episode and is between episodes."""
        return self._episodes > 0 and not self._plays

    @property
    def _plays(self) -> bool:
        return self._state in ("resetting", "playing")

    def line(self) -> SessionLine:
        """Return the session's entry for the list of sessions."""
        now = self._clock.monotonic()
        return SessionLine(
            session_id=self.session_id,
            state=self._state,
            age_seconds=round(now - self._begun_at, 1),
            silent_seconds=round(now - self.asked_at, 1),
            episodes=self._episodes,
            observations=self._observations,
            actions=self._actions,
            open=len(self._open),
        )

    async def play(self, inbox: asyncio.Queue[ClientMessage]) -> None:
        """Handle the client's messages in order until the session has to end."""
        await race(self._obey(inbox), self._watch(), self.ended.wait())

    async def close(self) -> None:
        """Stop the episode at any point and close the environment."""
        await self._stop()
        await self._held.close()

    async def _send(self, **message: Any) -> None:
        await self._put(encoded({"episode": self._number, **message}, self._limits.max_message_bytes))

    async def _fail(self, error: Exception, raised: str = RAISED) -> None:
        """Tell the client that a message or the episode has failed; `raised` is the code of a stranger's error."""
        code = error.code if isinstance(error, PalestraError) else raised
        await self._send(type="failed", code=code, message=error_line(error))

    async def _obey(self, inbox: asyncio.Queue[ClientMessage]) -> None:
        while True:
            message = (await inbox.get()).root
            self.asked_at = self._clock.monotonic()
            match message:
                case Open():
                    raise InvalidRequest("a session is opened once")
                case Act() | CancelObservation():
                    await self._answer(message)
                case Reset():
                    await self._stop()
                    self._state, self._number = "resetting", message.episode
                    self._pictures = set()
                    self._moved_at = self.asked_at
                    self._episodes += 1
                    self._episode = asyncio.create_task(self._play(message))
                case Abandon():
                    await self._abandon()

    async def _abandon(self) -> None:
        await self._stop()
        self._state = "idle"
        try:
            if self._held.present is not None:
                with ordinary_errors():
                    await self._held.present.abandon()
        except Exception as error:  # noqa: BLE001 - the user's code
            await self._fail(error)
        else:
            await self._send(type="abandoned")
        self._on_idle()

    async def _answer(self, message: Act | CancelObservation) -> None:
        """Pass an action on, or give up on an observation; the episode fails if that is not possible."""
        environment, name = self._held.present, message.observation_id
        if environment is not None and environment.is_withdrawn(name):  # message and withdrawal have crossed
            return
        if environment is None or self._state != "playing":
            await self._fail(Conflict(f"no episode is being played, so observation {name} waits for no action"))
            return
        try:
            with ordinary_errors():
                if isinstance(message, Act):
                    self._actions += 1
                    environment.act(name, message.action)
                else:
                    environment.cancel(name)
        except Exception as error:  # noqa: BLE001 - the user's code
            await self._fail(error)
        else:
            self._open.discard(name)
            self._moved_at = self.asked_at

    async def _play(self, order: Reset) -> None:
        """Reset the environment and send everything that it shows, until the episode is over or fails."""
        raised = RAISED
        try:
            with ordinary_errors():
                environment = await self._held.reset(order.task)
                self._state, raised = "playing", BROKEN
                await self._send(type="begun")
                await self._show_all(environment)
        except Exception as error:
            if not isinstance(error, PalestraError):
                log.warning("session %s: %s", self.session_id, error_line(error), exc_info=error)
            self._state = "failed"
            self._open.clear()
            await self._fail(error, raised)
        self._on_idle()

    async def _show_all(self, environment: ConcurrentEnvironment) -> None:
        """Send the observations of an episode until it is over."""
        while True:
            try:
                observation = await environment.observe()
            except EpisodeOver:
                await self._withdraw(environment)
                self._state = "over"
                self._open.clear()
                await self._send(type="over")
                return
            await self._withdraw(environment)
            alone = environment.waits_only_for(observation.id)
            survives = environment.survives_failure(observation.id)
            shown = message_of(observation, alone=alone, survives_failure=survives, sent=self._pictures)
            self._observations += 1
            self._moved_at = self._clock.monotonic()
            if not observation.is_last:
                self._open.add(observation.id)
            try:
                await self._send(**shown)
            except PalestraError as error:
                raise InvalidEnvironment(f"an observation of {observation.agent!r}: {error}") from error

    async def _withdraw(self, environment: ConcurrentEnvironment) -> None:
        """Tell the client which observations the environment no longer waits for."""
        for name in [name for name in self._open if environment.is_withdrawn(name)]:
            self._open.discard(name)
            action = environment.action_in_place(name)
            shown = None if action is None else action.model_dump(mode="json", exclude_none=True)
            await self._send(type="withdrawn", observation_id=name, action=shown)

    async def _watch(self) -> None:
        """Return when the client has been silent for too long, and fail episodes whose environment hangs."""
        limits = self._limits
        while (silent := self._clock.monotonic() - self.asked_at) <= limits.idle_seconds:
            await self._check_hanging()
            await asyncio.sleep(min(WATCH_SECONDS, limits.idle_seconds / 4, limits.hang_seconds / 4))
        log.info("session %s: idle for %g s", self.session_id, silent)

    async def _check_hanging(self) -> None:
        """Fail the episode if the environment, and not an agent, has been silent for `hang_seconds`."""
        silent = self._clock.monotonic() - self._moved_at
        if self._episode is None or self._open or not self._plays or silent < self._limits.hang_seconds:
            return
        self._episode.cancel()
        after, resetting = f"after {self._limits.hang_seconds:g} s", self._state == "resetting"
        self._state = "failed"
        if resetting:
            await self._fail(InvalidEnvironment(f"reset is not over, {after}"))
        else:
            await self._fail(EpisodeForfeited(f"nothing was shown, and the episode is not over, {after}"))
        self._on_idle()

    async def _stop(self) -> None:
        """Stop the episode that is being played, if there is one."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait((self._episode,))
            self._episode = None
        self._open.clear()


def error_line(error: Exception) -> str:
    """Return an error in one line; unexpected errors with type and location."""
    text = str(error) if isinstance(error, PalestraError) else f"{type(error).__name__}: {error}{place_of(error)}"
    return text.encode("utf-8", errors="replace").decode()[:2000]
