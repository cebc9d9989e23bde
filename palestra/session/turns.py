"""The states of a call, PENDING → GENERATING → INTERACTING, and the state of a session of many calls."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.session.context import StateTimes
from palestra.types.states import TurnState, check_transition

_MEASURED = {state: state for state in (TurnState.PENDING, TurnState.GENERATING)}  # by the call itself


class Turn:
    """One call and its states. Only tokens of GENERATING are trained.

    After the reply the agent acts; `Turns` measures that time, because only a session knows the next call.
    """

    def __init__(self, subject: str, times: StateTimes) -> None:
        """Start as PENDING."""
        self._subject, self._times = subject, times
        self.state = TurnState.PENDING
        times.move(None, self.state)

    def move(self, following: TurnState) -> None:
        """Change to the next state."""
        check_transition(self._subject, self.state, following)
        self._times.move(_MEASURED.get(self.state), _MEASURED.get(following))
        self.state = following


class Turns:
    """The running calls of a session. Without any, the agent or its environment acts."""

    def __init__(self, subject: str, times: StateTimes) -> None:
        """Start without calls; arguments as in `Turn`."""
        self._subject, self._times = subject, times
        self._open: set[Turn] = set()
        self._acting = False  # whether no call is in flight after there was one
        self._over = False

    def begin(self) -> Turn:
        """Add a running call, which ends the agent's action."""
        self._acted()
        turn = Turn(self._subject, self._times)
        self._open.add(turn)
        return turn

    def end(self, turns: Iterable[Turn]) -> None:
        """Remove calls. After the last one the agent acts."""
        self._open.difference_update(turns)
        if not self._open and not self._over:
            self._acting = True
            self._times.move(None, TurnState.INTERACTING)

    def terminate(self) -> None:
        """End the session, and stop measuring the agent's time."""
        self._over = True
        self._acted()

    def state(self, called: bool) -> TurnState:
        """Return the state of the session: GENERATING or PENDING if any call is, in this order; INTERACTING between
        calls.

        Args:
            called: whether there was any earlier call.
        """
        if self._over:
            return TurnState.TERMINATED
        states = {turn.state for turn in self._open}
        for state in (TurnState.GENERATING, TurnState.PENDING):
            if state in states:
                return state
        return TurnState.INTERACTING if called else TurnState.PENDING

    def _acted(self) -> None:
        """Stop measuring the time of the agent's action."""
        if self._acting:
            self._acting = False
            self._times.move(TurnState.INTERACTING, None)
