"""The player slots of one episode: their workers, observations and actions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from palestra.config import SeatsConfig
from palestra.database import Notifier
from palestra.errors import Conflict, EpisodeLeaseExpired, InvalidRequest, PalestraError, RolloutFailed
from palestra.session.seat import (
    ENVIRONMENT,
    POLICY,
    UNTIMED,
    AskedObservation,
    EpisodeSeat,
    SeatCalls,
    SeatWorld,
    action_digest,
)
from palestra.store.leases import LeaseBook
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage, Observation
from palestra.types.records import EpisodeRecord
from palestra.types.seat_wire import SeatAnswer, SeatEvent
from palestra.types.states import SEAT_LOST, SEAT_UNCLAIMED, SeatState


class SeatTable:
    """Passes observations and actions between one episode and its external players.

    Each observation is answered at most once, by the slot's worker or the role's policy. A worker gets only the
    observations of its own slot.

    Attributes:
        calls: model calls of the workers.
        changed: notified when a player has something new.
        world: the environment's time limits; set before the first observation.
    """

    def __init__(
        self, episode: EpisodeRecord, config: SeatsConfig, leases: LeaseBook, max_workers: int, clock: Clock
    ) -> None:
        """Create free slots. `leases` are those of the slots of all episodes, by `lease_of`. A slot may lose
        `max_workers` before the episode is given back.
        """
        self.episode, self.calls, self.changed = episode, SeatCalls(), Notifier()
        self._config, self._leases, self._max_workers, self._clock = config, leases, max_workers, clock
        self._seats = {role: EpisodeSeat(role=role, free_since=clock.monotonic()) for role in config.roles}
        self._numbers: dict[str, int] = {}  # observation -> its TimeStep
        self._events: list[SeatEvent] = []
        self._failure: PalestraError | None = None
        self.world: SeatWorld = UNTIMED

    def lease_of(self, role: str) -> str:
        """Return the name of a slot's lease, unique to this attempt at the episode."""
        return f"{self.episode.episode_id} {self.episode.fence} {role}"

    # What the server's runner does

    def show(self, observation: Observation, number: int | None) -> None:
        """Record an observation of any agent. `number` is its TimeStep; None: the agent's part is over."""
        if number is not None:
            self._numbers[observation.id] = number
        elif observation.agent in self._seats:
            seat = self._seats[observation.agent]
            seat.last, seat.finished = observation.content, True

    async def ask(self, observation: Observation) -> ChatMessage | None:
        """Wait for the action for a player's observation; None: the role's policy plays. Raises EpisodeLeaseExpired:
        the episode was given back meanwhile.
        """
        if self._failure is not None:
            raise self._failure
        seat = self._seats[observation.agent.partition("/")[0]]
        number = self._numbers[observation.id]
        if seat.state is SeatState.PLAYED:
            self.calls.note_action(number, POLICY)
            self.world.run_clock(observation.id)
            return None
        if seat.state is SeatState.LOST:
            self._forfeit(seat, observation, number)
        answer: asyncio.Future[ChatMessage | None] = asyncio.get_running_loop().create_future()
        asked = AskedObservation(observation=observation, number=number, since=self._clock.monotonic(), answer=answer)
        if seat.state is not SeatState.LOST:
            seat.asked[observation.id] = asked
        self.changed.notify()
        try:
            return await answer
        finally:
            if seat.asked.pop(observation.id, None) is not None:  # it is withdrawn without an answer
                seat.history[observation.agent] += observation.content
            self.changed.notify()

    def miss(self, observation_id: str, action: ChatMessage | None) -> None:
        """Record that the time for an action is over; model calls made for it are not trained. Observations of other
        agents are ignored; `action` is the environment's substitute, if any.
        """
        for seat in self._seats.values():
            if (asked := seat.asked.pop(observation_id, None)) is not None:
                self.calls.note_action(asked.number, ENVIRONMENT)
                seat.missed.add(observation_id)
                done = () if action is None else (action,)
                seat.history[asked.observation.agent] += (*asked.observation.content, *done)
                self.changed.notify()

    @property
    def unused_calls(self) -> list[int]:
        """Return the indices of calls that must not be trained; see `SeatCalls.unused`."""
        seats = self._seats.values()
        return self.calls.unused({s.role: s.fence if s.state is SeatState.HELD else POLICY for s in seats})

    # What workers do

    def can_take(self, role: str) -> bool:
        """Return whether a worker may claim a slot now."""
        seat = self._seats[role]
        return self._failure is None and seat.state is SeatState.FREE and not seat.finished

    @property
    def missed(self) -> tuple[str, ...]:
        """Return the free slots of an episode in which other players wait."""
        if not any(seat.state is SeatState.HELD for seat in self._seats.values()):
            return ()
        return tuple(role for role in self._seats if self.can_take(role))

    def could_spare(self, role: str) -> bool:
        """Return whether this player's worker may be moved to another episode: this one waits for a player that nobody
        ever claimed.
        """
        waits = any(seat.asked and not seat.fence and self.can_take(seat.role) for seat in self._seats.values())
        return waits and self._seats[role].state is SeatState.HELD

    def worker_of(self, role: str) -> str:
        """Return the last worker of a slot."""
        return self._seats[role].worker_id

    def seat_held_by(self, worker_id: str) -> str | None:
        """Return the slot that a worker holds, if any."""
        held = (s.role for s in self._seats.values() if s.state is SeatState.HELD and s.worker_id == worker_id)
        return next(held, None)

    def take(self, role: str, worker_id: str, seconds: float) -> int:
        """Give a worker a free slot under a lease, and return the slot's fence."""
        seat = self._seats[role]
        seat.move(SeatState.HELD)
        seat.fence, seat.worker_id, seat.held_since = seat.fence + 1, worker_id, self._clock.monotonic()
        seat.told = 0
        self._leases.grant(self.lease_of(role), seat.fence, seconds, worker_id)
        self._tell("seat_claimed", role)
        return seat.fence

    def holds(self, role: str, fence: int) -> bool:
        """Return whether the fence's worker still holds its slot."""
        seat = self._seats[role]
        return seat.state is SeatState.HELD and seat.fence == fence

    def history(self, role: str) -> dict[str, tuple[ChatMessage, ...]]:
        """Return the answered observations and the actions of a slot so far, by agent name."""
        return dict(self._seats[role].history)

    def renew(self, role: str, fence: int) -> None:
        """Renew the lease of a slot. Raises EpisodeLeaseExpired: the fence's worker has lost it."""
        self._held(role, fence)
        self._leases.renew(self.lease_of(role), fence)

    @contextmanager
    def holding(self, role: str, fence: int) -> Iterator[None]:
        """Keep a slot's lease from expiring while a request of its worker is answered. Raises EpisodeLeaseExpired: the
        fence's worker has lost it.
        """
        self._held(role, fence)
        with self._leases.hold(self.lease_of(role), fence):
            yield

    @contextmanager
    def calling(self, role: str, fence: int) -> Iterator[None]:
        """Run a model call of a worker; cancel it when the worker loses its slot. Raises EpisodeLeaseExpired: the slot
        was lost before or during the call.
        """
        task = asyncio.current_task()
        assert task is not None
        with self.holding(role, fence):
            seat = self._seats[role]
            seat.calls.add(task)
            try:
                yield
            except asyncio.CancelledError:
                if self.holds(role, fence):
                    raise
                raise self._lost(role) from None
            finally:
                seat.calls.discard(task)

    def turn(self, role: str, fence: int, agent: str) -> int:
        """Return the TimeStep of a player's model call: that of its pending observation.

        `agent` is the player or its subagent; an observation of the agent itself takes precedence. Raises
        EpisodeLeaseExpired: the fence's worker has lost its slot. Raises Conflict: no observation of the player is
        pending; the message says who has to act.
        """
        asked = list(self._held(role, fence).asked.values())
        own = [one for one in asked if one.observation.agent == agent]
        if not asked:
            raise Conflict(f"{role} has nothing to answer now; {self._who_acts()}; observe the seat before a call")
        return (own or asked)[0].number

    def act(self, role: str, fence: int, observation_id: str, action: ChatMessage) -> bool:
        """Answer an observation, and return whether the environment gets the action: False after a timeout.

        Repeating an equal action changes nothing.

        Raises:
            EpisodeLeaseExpired: the fence's worker has lost its slot.
            Conflict: another action was given before, or the observation is not pending for this player.
            InvalidRequest: the action is not among the observation's choices, and the environment does not score
                illegal actions.
        """
        seat, digest = self._seats[role], action_digest(action)
        known = seat.acted.get(observation_id)
        if known == digest and seat.fence == fence:  # also where the worker has left the seat since
            return True
        self._held(role, fence)
        if known == digest:
            return True
        if self.was_missed(role, fence, observation_id):
            return False
        if known is not None:
            raise Conflict(f"another action was given for observation {observation_id} before; the first one stands")
        asked = seat.asked.get(observation_id)
        if asked is None:
            raise Conflict(f"observation {observation_id} does not wait for an action of {role}; {self._who_acts()}")
        choices = asked.observation.choices
        if choices and action.text not in choices and not self.world.scores_illegal:
            raise InvalidRequest(f"{action.text!r:.80} is none of the choices: {', '.join(choices)}", "action")
        del seat.asked[observation_id]
        self.calls.note_action(asked.number, fence)
        seat.acted[observation_id] = digest
        seat.history[asked.observation.agent] += (*asked.observation.content, action)
        if not asked.answer.done():
            # Thoughts are the worker's own: neither the environment nor the policy that may take over reads them.
            asked.answer.set_result(action.model_copy(update={"reasoning_content": None}))
        return True

    def was_given(self, role: str, fence: int, observation_id: str, action: ChatMessage) -> bool:
        """Return whether an action was accepted earlier, possibly in an episode that is over."""
        seat = self._seats[role]
        return seat.fence == fence and seat.acted.get(observation_id) == action_digest(action)

    def was_missed(self, role: str, fence: int, observation_id: str) -> bool:
        """Return whether the time for an action had run out, possibly in an episode that is over."""
        seat = self._seats[role]
        return seat.fence == fence and observation_id in seat.missed

    def is_played_elsewhere(self, role: str) -> bool:
        """Return whether a player's actions come from workers that do not ask this job's models, so that its reward is
        not theirs.
        """
        seat = self._seats[role]
        return bool(seat.acted) and seat.state is not SeatState.PLAYED and not self.calls.led_to_action(role)

    @property
    def was_held(self) -> bool:
        """Return whether a worker has ever held a slot."""
        return any(seat.fence for seat in self._seats.values())

    def was_last(self, role: str, fence: int) -> bool:
        """Return whether a worker held its slot until the episode ended."""
        return self._seats[role].fence == fence and self._seats[role].kept

    def view(self, role: str, fence: int, events_seen: int | None) -> SeatAnswer:
        """Return what the worker of a slot may see now. `events_seen` is the number of the last event that the worker
        knows; None: of the last one sent to it. Raises EpisodeLeaseExpired: the fence's worker has lost its slot.
        """
        seat = self._held(role, fence)
        asked = next(iter(seat.asked.values()), None)
        seen = seat.told if events_seen is None else events_seen
        seat.told = len(self._events)
        if asked is not None:
            self.world.run_clock(asked.observation.id)
        return SeatAnswer(
            status="waiting" if asked is None else "act",
            observation=None if asked is None else asked.shown(),
            to_act=self.to_act,
            events=tuple(event for event in self._events[seen:] if event.role != role),
        )

    def last_of(self, role: str) -> tuple[ChatMessage, ...]:
        """Return a player's last observation, at the end of its part."""
        return self._seats[role].last

    @property
    def to_act(self) -> tuple[str, ...]:
        """Return the players whose action the episode waits for."""
        return tuple(seat.role for seat in self._seats.values() if seat.asked)

    # What ends

    def leave(self, role: str, fence: int) -> None:
        """Take a slot from its worker, which gave it back or whose lease expired. Raises EpisodeLeaseExpired: the
        fence's worker has lost it.
        """
        seat = self._held(role, fence)
        self._leases.drop(self.lease_of(role), fence)
        seat.move(SeatState.FREE)
        seat.left, seat.free_since = seat.left + 1, self._clock.monotonic()
        self._tell("seat_left", role)
        for observation_id in seat.asked:
            self.world.hold_clock(observation_id)
        for task in seat.calls:
            task.cancel()
        self.calls.free_seeds(role)
        if seat.finished:  # nothing is asked of it any more
            return
        if self._config.takeover == "policy":
            self._play(seat)
        elif self._config.takeover == "replay":
            self._lose(seat, f"the worker of the seat {role} is gone, and the episode is played again")
        elif seat.left >= self._max_workers:
            self._lose(seat, f"the seat {role} has lost {seat.left} workers (rollout.max_attempts)")

    def overdue(self) -> list[tuple[str, int]]:
        """Return the slots, with fences, whose workers have exceeded the time for an action."""
        now, limit = self._clock.monotonic(), self._config.wait_seconds
        return [
            (seat.role, seat.fence)
            for seat in self._seats.values()
            if seat.state is SeatState.HELD
            and seat.asked
            and now - max(min(asked.since for asked in seat.asked.values()), seat.held_since) >= limit
        ]

    def was_taken_over(self, agent: str) -> bool:
        """Return whether a policy has replaced a worker that left an agent's slot."""
        seat = self._seats.get(agent.partition("/")[0])
        return seat is not None and seat.state is SeatState.PLAYED and seat.left > 0

    def check_waiting(self) -> None:
        """Hand slots that have to act and were free for too long to their policies, or give the episode back."""
        now, limit = self._clock.monotonic(), self._config.wait_seconds
        for seat in self._seats.values():
            since = next((one.since for one in seat.asked.values()), None)
            if since is None or now - max(since, seat.free_since, seat.held_since) < limit:
                continue
            if seat.state is SeatState.HELD:  # a worker that does not look at what it has to answer has no more time
                self.world.run_clock(next(iter(seat.asked)))
                continue
            # An episode that no worker has come to is not played by policies alone: it waits for workers again.
            if self._config.takeover == "policy" and any(one.fence for one in self._seats.values()):
                self._play(seat)
                continue
            reason = f"no worker has claimed the seat {seat.role} for {limit:g} s (seats.wait_seconds)"
            if seat.left:
                self._lose(seat, reason)
            else:
                self.fail(SEAT_UNCLAIMED, reason)
                return

    def fail(self, termination: str, reason: str) -> None:
        """Give the episode back as failed."""
        self._end(RolloutFailed(termination, reason))

    def close(self, error: PalestraError) -> list[tuple[str, int]]:
        """End all slots, because the episode ended or was given back; return the held ones as (lease, fence)."""
        self._end(error)
        held = []
        for seat in self._seats.values():
            if seat.state is SeatState.HELD:
                seat.kept = True
                held.append((self.lease_of(seat.role), seat.fence))
                self._leases.drop(*held[-1])
            if seat.state is not SeatState.OVER:
                seat.move(SeatState.OVER)
            seat.history.clear()
        self.calls.close()  # the table is kept for late requests
        self.changed.notify()
        return held

    @property
    def failure(self) -> PalestraError | None:
        """Return why the slots have ended, or are about to; None: the episode is running."""
        return self._failure

    def _end(self, error: PalestraError) -> None:
        self._failure = self._failure or error
        for seat in self._seats.values():
            for asked in seat.asked.values():
                if not asked.answer.done():
                    asked.answer.set_exception(error)
                    asked.answer.exception()  # counts as read, also where the turn was cancelled meanwhile

    def _lose(self, seat: EpisodeSeat, reason: str) -> None:
        """End a slot that lost its worker: a forfeit if the environment scores that; otherwise the episode fails."""
        if not self.world.forfeits_lost_seats:
            self.fail(SEAT_LOST, reason)
            return
        seat.move(SeatState.LOST)
        self._tell("seat_lost", seat.role)
        for asked in list(seat.asked.values()):
            self._forfeit(seat, asked.observation, asked.number)
        seat.asked.clear()

    def _forfeit(self, seat: EpisodeSeat, observation: Observation, number: int) -> None:
        """Have the environment score a turn of a lost player. The runner cancels the wait for its action."""
        self.calls.note_action(number, ENVIRONMENT)
        seat.history[observation.agent] += observation.content
        self.world.lose_turn(observation.id)

    def _play(self, seat: EpisodeSeat) -> None:
        """Let the role's policy answer all pending and later observations."""
        seat.move(SeatState.PLAYED)
        self._tell("seat_played", seat.role)
        for asked in list(seat.asked.values()):
            self.world.run_clock(asked.observation.id)
            self.calls.note_action(asked.number, POLICY)
            if not asked.answer.done():
                asked.answer.set_result(None)
        seat.asked.clear()

    def _tell(self, kind: str, role: str) -> None:
        self._events.append(SeatEvent.model_validate({"number": len(self._events) + 1, "kind": kind, "role": role}))
        self.changed.notify()

    def _held(self, role: str, fence: int) -> EpisodeSeat:
        if not self.holds(role, fence):
            raise self._lost(role)
        return self._seats[role]

    def _lost(self, role: str) -> EpisodeLeaseExpired:
        played = self._seats[role].state is SeatState.PLAYED
        now = "its policy plays it now" if played else "its lease ran out, or it was given back"
        return EpisodeLeaseExpired(
            f"the seat {role} of episode {self.episode.episode_id} is no longer yours: {now}; claim again"
        )

    def _who_acts(self) -> str:
        acting = ", ".join(self.to_act)
        return f"to act: {acting}" if acting else "no seat is to act"
