"""The rollout machine of a call, PENDING → GENERATING → INTERACTING, and the state of a session of many calls."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.schemas.states import TurnState, check_transition
from palestra.session.counters import StateTimes


class Turn:
    """One call's way through the states. Only tokens of GENERATING are trained.

    After its reply it is the agent's move: `Turns` counts that, where it is known when the move ends.
    """

    def __init__(self, subject: str, times: StateTimes) -> None:
        """Begin as PENDING. `subject` is what an error calls the call."""
        self._subject, self._times = subject, times
        self.state = TurnState.PENDING
        times.enter(self.state)

    def move(self, following: TurnState) -> None:
        """Go to the next state.

        Raises:
            IllegalTransition: the machine does not have this move.
        """
        check_transition(self._subject, self.state, following)
        if self.state in (TurnState.PENDING, TurnState.GENERATING):
            self._times.leave(self.state)
        self.state = following
        if following in (TurnState.PENDING, TurnState.GENERATING):
            self._times.enter(following)


class Turns:
    """The calls of a session that are in flight; while there are none it is the agent's move."""

    def __init__(self, subject: str, times: StateTimes) -> None:
        """Begin without a call; see `Turn`."""
        self._subject, self._times = subject, times
        self._open: set[Turn] = set()
        self._acting = False  # no call is in flight, and there was one
        self._over = False

    def begin(self) -> Turn:
        """Add a call, which ends the agent's move."""
        self._acted()
        turn = Turn(self._subject, self._times)
        self._open.add(turn)
        return turn

    def end(self, turns: Iterable[Turn]) -> None:
        """Take calls out. After the last one it is the agent's move."""
        self._open.difference_update(turns)
        if not self._open and not self._over:
            self._acting = True
            self._times.enter(TurnState.INTERACTING)

    def terminate(self) -> None:
        """End the agent's move for good: no call will come."""
        self._over = True
        self._acted()

    def state(self, called: bool) -> TurnState:
        """Return the state of the session.

        GENERATING if any call is, else PENDING if any is; between calls the agent or its environment acts.

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
        if self._acting:
            self._acting = False
            self._times.leave(TurnState.INTERACTING)
