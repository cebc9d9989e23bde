"""What the seats of an episode tell its environment: when the clocks of turns run, and which turns are lost."""

from __future__ import annotations

from typing import Protocol


class SeatWorld(Protocol):
    """An environment that limits the time of its agents' turns, or scores that a seat has lost its worker."""

    @property
    def forfeits_lost_seats(self) -> bool:
        """Return whether a seat that is lost is a forfeit, and not a failure of the episode."""

    @property
    def scores_illegal(self) -> bool:
        """Return whether the environment takes an action that is none of an observation's choices."""

    def run_clock(self, observation_id: str) -> None:
        """Let the time for an action run; one without a limit has no clock."""

    def hold_clock(self, observation_id: str) -> None:
        """Hold the time for an action."""

    def lose_turn(self, observation_id: str) -> None:
        """Score a turn that no one will take; only where `forfeits_lost_seats`."""


class _Untimed:
    """A world without time limits, which scores no lost seat."""

    forfeits_lost_seats = False
    scores_illegal = True

    def run_clock(self, observation_id: str) -> None: ...

    def hold_clock(self, observation_id: str) -> None: ...

    def lose_turn(self, observation_id: str) -> None: ...


UNTIMED: SeatWorld = _Untimed()
