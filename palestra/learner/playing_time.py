"""How long the episodes of a step were played, and so how many tokens a second their calls had."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class PlayingTime:
    """Measures the time in which each step's episodes were played, as far as this process has seen it.

    If episodes are played ahead of training, a step hardly waits for its own: they were played since the previous
    step's were complete.
    """

    def __init__(self, ahead: bool, now: Callable[[], float] = time.monotonic) -> None:
        """Begin before the first step.

        Args:
            ahead: whether episodes are played while earlier steps are trained.
            now: returns monotonic seconds.
        """
        self._ahead, self._now = ahead, now
        self._gathered_at: float | None = None  # when this process had the episodes of a step together; None: not yet
        self._seconds: float | None = None  # in which those of the newest step were played; None: not known
        self.resumed = False  # episodes of the first step that is gathered may have been played before the restart

    def gathered(self, started: float) -> None:
        """Record that a step's episodes are complete.

        Args:
            started: when the step began to wait for them.
        """
        before, self._gathered_at = self._gathered_at, self._now()
        if before is None and self.resumed:
            self._seconds = None
        else:
            self._seconds = self._gathered_at - (before if before is not None and self._ahead else started)

    def not_played(self) -> None:
        """Record that a step needed no playing: its batch was fixed before a restart, or its episodes are recorded."""
        self._seconds = None

    def rate(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the newest step's tokens per second as a metric, by full name; empty if unknown."""
        if not self._seconds:
            return {}
        return {
            "rollout/tokens_per_second": (row["rollout/prompt_tokens"] + row["rollout/completion_tokens"])
            / self._seconds
        }
