"""`Coordinator`: keeps the agents of an episode to a protocol, in any order of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from palestra.envs.protocols import AgentProtocol
from palestra.errors import IllegalTransition, InvalidEnvironment
from palestra.types.states import AgentState, check_transition

Action = TypeVar("Action")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimit:
    """How long a role may think about one action.

    Attributes:
        seconds: from the moment when the role gets the observation. For an external player, only the time counts during
            which a worker has it.
        default: text of the action taken when the time is over; None: the role is late, which fails the episode unless
            the environment's `forfeits` include `Fault.LATE`.
    """

    seconds: float
    default: str | None = None

    def __post_init__(self) -> None:
        """Check the number."""
        if not self.seconds > 0:
            raise ValueError(f"a time limit is a positive number of seconds, not {self.seconds}")


class TurnClock:
    """A stoppable countdown for one action, with a callback."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        """Create a stopped clock. `late`: called once, by the event loop, when the time is over."""
        self._left, self._late = seconds, late
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0

    def run(self) -> None:
        """Run the clock; no effect if it runs."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._timer = loop.call_later(self._left, self._late)

    def hold(self) -> None:
        """Stop the clock and keep the remaining time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left = max(self._left - (asyncio.get_running_loop().time() - self._since), 0.0)


class Coordinator(Generic[Action]):
    """Tracks which agents are waiting, acting or done, and holds actions until a barrier is complete.

    The environment calls `begin`, shows each asked role an observation, passes every answer to `answer`, applies the
    actions from `take`, and calls `advance` for the roles to ask next. Actions are applied in the order of roles, never
    in that of their arrival. Only a protocol without barriers (`free`) that is not `deterministic` applies each action
    when it arrives.
    """

    def __init__(self, roles: Sequence[str], protocol: AgentProtocol, *, deterministic: bool = True) -> None:
        """Create the coordinator of one episode.

        Args:
            roles: names of all agents, in the order in which their actions are applied.
            protocol: decides who may act when.
            deterministic: whether a protocol without barriers also waits for every asked agent, so that results do not
                depend on who answers first.

        Raises:
            InvalidEnvironment: there are no roles, one is named twice, or the protocol names another one.
        """
        if not roles or len(set(roles)) != len(roles):
            raise InvalidEnvironment(f"an environment has at least one role, each with its own name, not {roles!r}")
        self._protocol, self._deterministic = protocol, deterministic
        self.stages = protocol.stages()
        self._rank = {role: place for place, role in enumerate(roles)}
        self._states = dict.fromkeys(roles, AgentState.WAITING)
        self._playing = dict.fromkeys(roles)
        self._acting: dict[str, None] = {}
        self._held: dict[str, Action] = {}  # answers of a barrier that is not complete
        self._ready: dict[str, Action] = {}  # answers that can be applied, in the order of roles
        self._together = True
        for role in (role for stage in self.stages for role in stage.roles):
            self._check_known(role)

    @property
    def playing(self) -> Collection[str]:
        """Return the roles that are not done, in order."""
        return self._playing.keys()

    @property
    def to_act(self) -> tuple[str, ...]:
        """Return the roles that are to act now, in the order in which they were asked."""
        return tuple(self._acting)

    def state(self, role: str) -> AgentState:
        """Return the state of an agent.

        Raises:
            InvalidEnvironment: there is no such role.
        """
        self._check_known(role)
        return self._states[role]

    def begin(self) -> tuple[str, ...]:
        """Begin the protocol and return the roles that act first."""
        return self._ask(self._protocol.begin(self.playing))

    def check_turn(self, role: str) -> None:
        """Raise an error unless this role is to act.

        Raises:
            IllegalTransition: the role is waiting or done; the message names who is to act.
            InvalidEnvironment: there is no such role.
        """
        if (state := self.state(role)) is not AgentState.ACTING:
            raise IllegalTransition(
                f"{role!r} is {state}, not {AgentState.ACTING}, so it can't act now; {self.who_acts()}"
            )

    def who_acts(self) -> str:
        """Describe who is to act."""
        if not self._acting:
            return "no agent is to act"
        return f"{', '.join(map(repr, self._acting))} {'are' if len(self._acting) > 1 else 'is'} to act"

    def answer(self, role: str, action: Action) -> None:
        """Accept the action of a role; `take` returns it when its barrier is complete.

        Raises:
            IllegalTransition: the role is not to act; the message names who is.
        """
        self.check_turn(role)
        self._move(role, AgentState.WAITING)
        del self._acting[role]
        self._held[role] = action
        self._release()

    def take(self) -> dict[str, Action]:
        """Return the actions to apply now, in the order of roles; {}: more answers are needed."""
        if self._together:
            taken, self._ready = self._ready, {}
            return taken
        if not self._ready:
            return {}
        role = next(iter(self._ready))
        return {role: self._ready.pop(role)}

    def advance(self, acted: Sequence[str]) -> tuple[str, ...]:
        """Return the roles to ask after these have acted; empty without roles that are to act: the protocol is over.

        Raises:
            InvalidEnvironment: the protocol asks a role that does not exist, is done, or has been asked already.
        """
        pending = self._acting.keys() | self._ready.keys()
        return self._ask(self._protocol.following(acted, self.playing, pending))

    def retire(self, role: str) -> None:
        """End the part of a role in any state: it is never asked again, and its answer is dropped.

        Raises:
            IllegalTransition: its part has ended before.
        """
        self._check_known(role)
        self._move(role, AgentState.DONE)
        del self._playing[role]
        self._held.pop(role, None)
        self._ready.pop(role, None)
        if role in self._acting:
            del self._acting[role]
            self._release()

    def _ask(self, roles: Sequence[str]) -> tuple[str, ...]:
        self._together = self._protocol.together  # of the phase that begins now, perhaps
        for role in roles:
            self._check_known(role)
            if (state := self._states[role]) is not AgentState.WAITING or role in self._ready:
                raise InvalidEnvironment(f"the protocol asks {role!r}, which is {state}, for an action")
            self._move(role, AgentState.ACTING)
            self._acting[role] = None
        return tuple(roles)

    def _release(self) -> None:
        """Release the held answers if all have arrived."""
        if self._acting and (self._together or self._deterministic):
            return
        self._ready.update((role, self._held[role]) for role in sorted(self._held, key=self._rank.__getitem__))
        self._held = {}

    def _move(self, role: str, following: AgentState) -> None:
        check_transition(f"agent {role!r}", self._states[role], following)
        self._states[role] = following

    def _check_known(self, role: str) -> None:
        if role not in self._states:
            raise InvalidEnvironment(f"there is no role {role!r}; there are {', '.join(map(repr, self._states))}")
