"""Measures how long a server with work has made no progress."""

from __future__ import annotations


class Stillness:
    """Detects when a server's progress has stopped, from repeated checks.

    A server may answer questions while its computing process is stuck, so answers do not count as progress.
    """

    def __init__(self, now: float, progress: tuple[int, ...]) -> None:
        """Begin.

        Args:
            now: seconds of any clock.
            progress: numbers, some of which grow when the server computes.
        """
        self._since, self._progress = now, progress

    def seconds(self, now: float, progress: tuple[int, ...], may_move: bool) -> float:
        """Return how long the server has made no progress.

        Args:
            now: seconds of the same clock.
            may_move: whether the server has requests and is not paused; otherwise the result is 0.
        """
        if progress != self._progress or not may_move:
            self._since, self._progress = now, progress
        return now - self._since
