"""Signals from external players to their environment: clocks of turns, and lost turns."""

from __future__ import annotations

from typing import Protocol


class SeatWorld(Protocol):
    """An environment that limits turn times, or scores lost players."""

    @property
    def forfeits_lost_seats(self) -> bool:
        """Return whether losing a player is a forfeit instead of a failure of the episode."""

    @property
    def scores_illegal(self) -> bool:
        """Return whether the environment accepts actions outside the observation's choices."""

    def run_clock(self, observation_id: str) -> None:
        """Run the clock of an action, if it has a limit."""

    def hold_clock(self, observation_id: str) -> None:
        """Stop the clock of an action."""

    def lose_turn(self, observation_id: str) -> None:
        """Score a turn that nobody will take; only with `forfeits_lost_seats`."""


class _Untimed:
    """An environment without time limits and forfeits."""

    forfeits_lost_seats = False
    scores_illegal = True

    def run_clock(self, observation_id: str) -> None: ...

    def hold_clock(self, observation_id: str) -> None: ...

    def lose_turn(self, observation_id: str) -> None: ...


UNTIMED: SeatWorld = _Untimed()
