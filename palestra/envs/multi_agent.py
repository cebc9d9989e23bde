"""The base class for environments of several agents: roles, a protocol, views, and the effects of actions."""

from __future__ import annotations

import asyncio
import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.coordinator import Coordinator, TimeLimit, TurnClock
from palestra.envs.protocols import AgentProtocol, turns
from palestra.envs.rewards import finite_reward
from palestra.errors import Conflict, EpisodeForfeited, EpisodeOver, InvalidEnvironment, PalestraError, RolloutFailed
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage, Observation, text_message
from palestra.types.states import AgentState
from palestra.waiting import ordinary_errors

log = logging.getLogger("palestra.envs")
_TOLERANCE = 1e-9  # of the sum of rewards


class Fault(StrEnum):
    """Why an agent's turn had no valid action."""

    ILLEGAL = "illegal"  # the reply is none of the observation's choices, or the world breaks by it
    LATE = "late"  # the time limit is over, and has no default action
    FAILED = "failed"  # the agent raised, or its context is full
    LEFT = "left"  # the worker of its seat is gone, and no other one takes the seat


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The effects of actions.

    Attributes:
        rewards: by role; added to its earlier ones.
        over: whether the episode has ended, for all roles.
        done: roles whose part has ended while others continue.
        truncated: whether these ends are cuts, for example by a limit.
        info: for people; recorded with the last observation of each role that ends.
    """

    rewards: Mapping[str, float] = field(default_factory=dict)
    over: bool = False
    done: Collection[str] = ()
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class MultiAgentEnvironment(ConcurrentEnvironment):
    """A world of several agents, each with a role, a conversation and rewards of its own.

    A subclass sets `roles` and implements `begin`, `view` and `apply`. `protocol` decides who may act when; by default
    in turns. Actions of agents that act at the same time are applied together, in the order of roles, so that results
    do not depend on who answers first. The methods of a subclass may be `async`; they never run at the same time.

    The failure of one agent fails the episode, and never counts as a win of another, unless `forfeits` includes it.

    Attributes:
        roles: names of the agents.
        zero_sum: whether the rewards of an episode add up to `total`; otherwise it fails.
        total: sum of an episode's rewards, if `zero_sum`.
        forfeits: faults that `forfeit()` turns into rewards instead of failing the episode.
        time_limits: time limits by role; other roles have none.
        deterministic: whether a protocol without barriers (`free`) also waits for all asked agents.
        coordinator: of the present episode.
    """

    roles: tuple[str, ...] = ()
    zero_sum: bool = False
    total: float = 0.0
    forfeits: frozenset[Fault] = frozenset()
    time_limits: Mapping[str, TimeLimit] = {}
    deterministic: bool = True
    coordinator: Coordinator[ChatMessage | Fault]

    def __init__(self, clock: Clock | None = None) -> None:
        """Create an environment without an episode.

        Args:
            clock: source of `Observation.observed_at`; None: the system's clock.
        """
        super().__init__(clock)
        self._over = True
        self._seats: Collection[str] = ()  # roles whose clocks run only while they are told to
        self._told_late: Callable[[str, ChatMessage | None], None] = lambda observation_id, action: None

    # Methods that a subclass implements.

    @abstractmethod
    def begin(self, task: Mapping[str, Any]) -> Awaitable[None] | None:
        """Prepare the world for the episode of `task`. All randomness comes from the task."""

    @abstractmethod
    def view(self, role: str) -> str | tuple[ChatMessage, ...] | Awaitable[str | tuple[ChatMessage, ...]]:
        """Return the view of a role that is to act: a text, or messages to append to its conversation."""

    @abstractmethod
    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome | Awaitable[Outcome | None] | None:
        """Apply the actions of agents that acted at the same time.

        Args:
            actions: the agents' messages by role, in the order of `roles`.

        Returns:
            Rewards and ends; None: the episode continues, and nothing is scored.
        """

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return the protocol for the episode of `task`; called after `begin`. By default turns."""
        return turns(self.roles)

    def rules(self, role: str) -> str:
        """Return the text before the first view of a role, on lines of its own; "": no text."""
        return ""

    def legal(self, role: str) -> Sequence[str]:
        """Return the valid replies of a role to its view; (): any."""
        return ()

    def forfeit(self, role: str, fault: Fault) -> Outcome | Awaitable[Outcome]:
        """Return the outcome when a role gave no valid action. Called for faults in `forfeits`."""
        raise NotImplementedError(f"{type(self).__name__}.forfeits has {fault!r}, and there is no method `forfeit`")

    def final_outcome(self) -> Outcome:
        """Return the rewards when the protocol is over, or `max_steps` is reached, before the world
        ends the episode.
        """
        return Outcome()

    # How the environment is played.

    async def start(self, task: Mapping[str, Any]) -> None:
        """Begin the world's episode and show the first roles their views."""
        self._shown: dict[str, Observation] = {}  # the last observation of each role
        self._due: dict[str, float] = {}  # rewards that the role's next observation brings
        self._totals = dict.fromkeys(self.roles, 0.0)
        self._scored = False
        self._timers: dict[str, TurnClock] = {}
        self._turnstile = asyncio.Lock()
        self._over = False
        await awaited_result(self.begin(task))
        self.coordinator = Coordinator(self.roles, self.protocol(task), deterministic=self.deterministic)
        await self._show(self.coordinator.begin(), ())

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Accept an agent's action, and apply it when its barrier is complete."""
        legal = not observation.choices or action.text in observation.choices
        await self._accept(observation, action if legal else Fault.ILLEGAL)

    async def observe(self) -> Observation:
        """Wait for the next observation and return it.

        Raises:
            EpisodeOver: the episode is over.
            InvalidEnvironment: the environment is stuck, and the episode is not over.
        """
        try:
            return await super().observe()
        except EpisodeOver:
            if self._over:
                raise
            raise InvalidEnvironment(
                f"the episode can't continue and is not over: {self.coordinator.who_acts()}, and no observation of it "
                "waits for an answer"
            ) from None

    def act(self, observation_id: str, action: ChatMessage) -> None:
        """Answer an observation and return without waiting for the consequences.

        Raises:
            Conflict: another action was given before, or the observation expects none; the message names who is to act.
        """
        try:
            super().act(observation_id, action)
        except Conflict as error:
            raise Conflict(f"{error}; {self.coordinator.who_acts()}") from None

    def waits_only_for(self, observation_id: str) -> bool:
        """Return whether the environment is blocked until this observation is answered; a time limit unblocks it."""
        return not self._timers and super().waits_only_for(observation_id)

    def survives_failure(self, observation_id: str) -> bool:
        """Return whether the environment scores the failure of an agent."""
        return Fault.FAILED in self.forfeits and observation_id in self._open

    def cancel(self, observation_id: str) -> None:
        """Give up on an observation because its agent has failed."""
        observation = self._open.get(observation_id)
        super().cancel(observation_id)
        if observation is not None and not self._over:
            self._work(observation_id, partial(self._accept, observation, Fault.FAILED))

    @property
    def has_scored(self) -> bool:
        """Return whether the present episode has rewarded any role, possibly with 0."""
        return self._scored

    @property
    def forfeits_lost_seats(self) -> bool:
        """Return whether the environment scores a role whose external player is lost for good."""
        return Fault.LEFT in self.forfeits

    @property
    def scores_illegal(self) -> bool:
        """Return whether a reply outside the choices is scored instead of failing the episode."""
        return Fault.ILLEGAL in self.forfeits

    def pace(self, seats: Collection[str], late: Callable[[str, ChatMessage | None], None]) -> None:
        """Run the clocks of roles only while `run_clock` allows it, because external workers play them.

        Args:
            seats: these roles.
            late: called with an observation's id, and the default action, if there is one, when the time for an action
                is over.
        """
        self._seats, self._told_late = tuple(seats), late

    def run_clock(self, observation_id: str) -> None:
        """Run the time for an action: a worker has the observation, or the role's policy plays it."""
        if (clock := self._timers.get(observation_id)) is not None:
            clock.run()

    def hold_clock(self, observation_id: str) -> None:
        """Stop the time for an action, because the external player has no worker."""
        if (clock := self._timers.get(observation_id)) is not None:
            clock.hold()

    def lose_turn(self, observation_id: str) -> None:
        """Score the turn of a role whose external player is lost; only if `forfeits_lost_seats`."""
        if (observation := self._open.get(observation_id)) is not None:
            self.withdraw(observation_id)
            self._work(observation_id, partial(self._accept, observation, Fault.LEFT))

    async def abandon(self) -> None:
        """End the episode at any point and wait until its work has stopped."""
        self._over = True
        self._end_timers()
        await super().abandon()

    # What happens to an action.

    async def _accept(self, observation: Observation, action: ChatMessage | Fault) -> None:
        role = observation.agent
        if (timer := self._timers.pop(observation.id, None)) is not None:
            timer.hold()
        async with self._turnstile:
            # While this action waited, another one may have ended the part of its role, or the episode.
            if self._over or self.coordinator.state(role) is AgentState.DONE:
                return
            if isinstance(action, Fault) and action not in self.forfeits:
                raise RolloutFailed("agent_failed", self._said(observation, action))
            self.coordinator.answer(role, action)
            await self._advance()

    async def _advance(self) -> None:
        """Apply all actions whose barriers are complete, and ask the next roles."""
        asked: list[str] = []
        causes: list[str] = []
        while actions := self.coordinator.take():
            causes += [self._shown[role].id for role in actions]
            await self._play(actions)
            if self._over:
                return
            asked += self.coordinator.advance(tuple(actions))
        if not self.coordinator.to_act:
            self._end(self.final_outcome())
        elif self.cut_off:
            outcome = self.final_outcome()
            self._end(Outcome(rewards=outcome.rewards, truncated=True, info=outcome.info))
        else:
            await self._show(asked, causes)

    async def _play(self, actions: Mapping[str, ChatMessage | Fault]) -> None:
        """Score the faults of these roles, then apply the actions of the others."""
        applied: dict[str, ChatMessage] = {}
        for role, action in actions.items():
            if not isinstance(action, Fault):
                applied[role] = action
                continue
            self._settle(await awaited_result(self.forfeit(role, action)))
            if self._over:
                return
        if applied and (outcome := await self._applied(applied)) is not None:
            self._settle(outcome)

    async def _applied(self, actions: Mapping[str, ChatMessage]) -> Outcome | None:
        """Apply actions. One that breaks the world is an illegal one, where the environment scores these."""
        try:
            with ordinary_errors():
                outcome: Outcome | None = await awaited_result(self.apply(actions))
        except Exception as error:
            own = isinstance(error, PalestraError) and not isinstance(error, EpisodeForfeited)
            if own or len(actions) > 1 or Fault.ILLEGAL not in self.forfeits:
                raise
            (role,) = actions
            log.warning("%s: the action of %r has broken the world: %s", type(self).__name__, role, error)
            outcome = await awaited_result(self.forfeit(role, Fault.ILLEGAL))
        return outcome

    def _settle(self, outcome: Outcome) -> None:
        """Store rewards for the roles' next observations, and end what is over."""
        if outcome.over:
            self._end(outcome)
            return
        self._reward(outcome.rewards)
        for role in outcome.done:
            self._end_role(role, outcome)

    def _reward(self, rewards: Mapping[str, Any]) -> None:  # of a user's code, so perhaps no numbers
        self._scored = self._scored or bool(rewards)
        for role, reward in rewards.items():
            if self.coordinator.state(role) is AgentState.DONE:
                raise InvalidEnvironment(f"{role!r} gets a reward of {reward} after its part has ended")
            number = finite_reward(f"the reward of {role!r}", reward, "is")
            self._due[role] = self._due.get(role, 0.0) + number
            self._totals[role] += number

    def _end(self, outcome: Outcome) -> None:
        """End the episode: give each role that is not done its last observation, with its reward."""
        self._reward(outcome.rewards)
        self._over = True
        if self.zero_sum and abs(math.fsum(self._totals.values()) - self.total) > _TOLERANCE:
            rewards = ", ".join(f"{role} {reward:g}" for role, reward in self._totals.items())
            raise InvalidEnvironment(
                f"the rewards of an episode add up to {math.fsum(self._totals.values()):g}, and the environment "
                f"declares zero_sum with a total of {self.total:g}: {rewards}"
            )
        playing = self.coordinator.playing
        for role in [*(role for role in outcome.rewards), *(role for role in playing if role not in outcome.rewards)]:
            self._end_role(role, outcome)
        self._end_timers()

    def _end_role(self, role: str, outcome: Outcome) -> None:
        self.coordinator.retire(role)
        last = self._shown.get(role)
        if last is not None and last.id in self._open:
            self.withdraw(last.id)
        self.emit(
            role,
            (),
            parents=() if last is None else (last.id,),
            reward=self._due.pop(role, 0.0),
            terminated=not outcome.truncated,
            truncated=outcome.truncated,
            info=outcome.info,
        )

    async def _show(self, roles: Sequence[str], causes: Sequence[str]) -> None:
        """Show each of these roles its view, in the order in which they were asked."""
        seen = [(role, await awaited_result(self.view(role))) for role in roles if role in self.coordinator.playing]
        caused, known = tuple(causes), set(causes)
        for role, view in seen:
            last = self._shown.get(role)
            content = (text_message("user", self._text(role, view)),) if isinstance(view, str) else view
            own = () if last is None else (last.id,)
            reward = self._due.pop(role, None)
            # A reward belongs to the role's own action, so an observation that brings one has no other cause. The
            # parents of a barrier's observations are one tuple: with many agents, one each would be quadratic.
            parents = own if reward is not None else caused if known.issuperset(own) else (*own, *caused)
            choices = tuple(self.legal(role))
            shown = self.emit(role, content, parents=parents, choices=choices, reward=reward)
            self._shown[role] = shown
            if (limit := self.time_limits.get(role)) is not None and not shown.is_last:
                clock = self._timers[shown.id] = TurnClock(limit.seconds, partial(self._late, shown, limit))
                if role not in self._seats:
                    clock.run()

    def _text(self, role: str, view: str) -> str:
        rules = "" if role in self._shown else self.rules(role)
        return f"{rules}\n{view}" if rules else view

    def _late(self, observation: Observation, limit: TimeLimit) -> None:
        """Take the default action of a role whose time is over, or record its fault."""
        self._timers.pop(observation.id, None)
        if observation.id not in self._open:
            return
        action = None if limit.default is None else text_message("assistant", limit.default)
        self.withdraw(observation.id, action)
        self._told_late(observation.id, action)
        self._work(observation.id, partial(self._accept, observation, action or Fault.LATE))

    def _end_timers(self) -> None:
        for timer in getattr(self, "_timers", {}).values():
            timer.hold()
        self._timers = {}

    def _said(self, observation: Observation, fault: Fault) -> str:
        """Describe what a role has failed to do."""
        role = observation.agent
        if fault is Fault.LATE:
            return f"{role!r} did not act within {self.time_limits[role].seconds:g} s"
        if fault is Fault.ILLEGAL:
            said = self._acted[observation.id].text
            return f"{role!r} replied {said!r:.80}, which is none of its choices: {', '.join(observation.choices)}"
        return f"{role!r} failed"


async def awaited_result(found: Any) -> Any:
    """Return the result of a subclass's method, awaited if the method is `async`."""
    return await found if isinstance(found, Awaitable) else found
