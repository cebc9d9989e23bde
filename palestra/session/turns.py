"""The states of a call, PENDING → GENERATING → INTERACTING, and the state of a session of many calls."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.session.context import StateTimes
from palestra.types.states import TurnState, check_transition


class Turn:
    """One call on its way through the states. Only tokens of GENERATING are trained.

    After its reply the agent acts. `Turns` measures that time, because only a session knows when the next call comes.

    Attributes:
        state: the present state.
    """

    def __init__(self, subject: str, times: StateTimes) -> None:
        """Start as PENDING."""
        self._subject, self._times = subject, times
        self.state = TurnState.PENDING
        times.enter(self.state)

    def move(self, following: TurnState) -> None:
        """Change to the next state.

        Raises:
            IllegalTransition: the lifecycle does not have this move.
        """
        check_transition(self._subject, self.state, following)
        if self.state in (TurnState.PENDING, TurnState.GENERATING):
            self._times.leave(self.state)
        self.state = following
        if following in (TurnState.PENDING, TurnState.GENERATING):
            self._times.enter(following)


class Turns:
    """The calls of a session that are in flight. While there are none, the agent or its environment acts."""

    def __init__(self, subject: str, times: StateTimes) -> None:
        """Start without calls. The arguments are those of `Turn`."""
        self._subject, self._times = subject, times
        self._open: set[Turn] = set()
        self._acting = False  # whether no call is in flight after there was one
        self._over = False

    def begin(self) -> Turn:
        """Add a call in flight, which ends the time of the agent's action."""
        self._acted()
        turn = Turn(self._subject, self._times)
        self._open.add(turn)
        return turn

    def end(self, turns: Iterable[Turn]) -> None:
        """Remove calls. After the last one the agent acts."""
        self._open.difference_update(turns)
        if not self._open and not self._over:
            self._acting = True
            self._times.enter(TurnState.INTERACTING)

    def terminate(self) -> None:
        """End the session: no further call will come, so the agent's time is not measured any more."""
        self._over = True
        self._acted()

    def state(self, called: bool) -> TurnState:
        """Return the state of the session.

        GENERATING if any call is, else PENDING if any is; between calls the agent or its environment acts
        (INTERACTING).

        Args:
            called: whether there was any call before.
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
            self._times.leave(TurnState.INTERACTING)
