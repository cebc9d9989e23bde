"""The rollout machine of one call, PENDING → GENERATING → INTERACTING, and the time that all of them spend in it."""

from __future__ import annotations

from collections import Counter, defaultdict

from palestra.schemas.clock import Clock
from palestra.schemas.states import TurnState, check_transition


class StateTimes:
    """Time spent in each state, over all calls of a server; those that are in it count up to now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: defaultdict[TurnState, float] = defaultdict(float)  # what is over, less when others began
        self._inside: Counter[TurnState] = Counter()

    def enter(self, state: TurnState) -> None:
        """One more is in this state."""
        self._since[state] -= self._clock.monotonic()
        self._inside[state] += 1

    def leave(self, state: TurnState) -> None:
        """One less."""
        self._since[state] += self._clock.monotonic()
        self._inside[state] -= 1

    def inside(self, state: TurnState) -> int:
        """How many are in this state now."""
        return self._inside[state]

    @property
    def seconds(self) -> dict[TurnState, float]:
        """By state, for those that were ever entered."""
        now = self._clock.monotonic()
        return {state: since + self._inside[state] * now for state, since in list(self._since.items())}


class Turn:
    """One call's way through the states. Only tokens of GENERATING are trained.

    After its reply it is the agent's move: that is counted where it is known when it ends, in the session.
    """

    def __init__(self, subject: str, times: StateTimes) -> None:
        self._subject, self._times = subject, times
        self.state = TurnState.PENDING
        times.enter(self.state)

    def move(self, following: TurnState) -> None:
        """Go to the next state.

        Raises:
            IllegalTransition: the machine does not have this move.
        """
        check_transition(self._subject, self.state, following)
        self._end()
        self.state = following
        if following in (TurnState.PENDING, TurnState.GENERATING):
            self._times.enter(following)

    def _end(self) -> None:
        if self.state in (TurnState.PENDING, TurnState.GENERATING):
            self._times.leave(self.state)
