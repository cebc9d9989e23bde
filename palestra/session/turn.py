"""The rollout machine of one call: PENDING → GENERATING → INTERACTING, with the time spent in each state."""

from __future__ import annotations

from palestra.schemas.clock import Clock
from palestra.schemas.states import TurnState, check_transition


class Turn:
    """One call's way through the states. Only tokens of GENERATING are trained."""

    def __init__(self, subject: str, clock: Clock, seconds: dict[TurnState, float]) -> None:
        self._subject, self._clock, self._seconds = subject, clock, seconds
        self.state = TurnState.PENDING
        self._since = clock.monotonic()

    def move(self, following: TurnState) -> None:
        """Go to the next state.

        Raises:
            IllegalTransition: the machine does not have this move.
        """
        check_transition(self._subject, self.state, following)
        now = self._clock.monotonic()
        self._seconds[self.state] = self._seconds.get(self.state, 0.0) + now - self._since
        self.state, self._since = following, now
