"""For how long a server has computed nothing, although it had something to compute."""

from __future__ import annotations


class Stillness:
    """Finds, look by look, since when a server's progress has stood still.

    A server may answer questions while the process that computes stands still, so that an answer is no progress.
    """

    def __init__(self, now: float, progress: tuple[int, ...]) -> None:
        """Begin to look.

        Args:
            now: seconds of any clock.
            progress: numbers of which one grows when the server computes.
        """
        self._since, self._progress = now, progress

    def seconds(self, now: float, progress: tuple[int, ...], may_move: bool) -> float:
        """Return for how long the server has stood still.

        Args:
            now: seconds of the same clock.
            may_move: whether the server has requests and is not paused; otherwise it does not stand still.
        """
        if progress != self._progress or not may_move:
            self._since, self._progress = now, progress
        return now - self._since
