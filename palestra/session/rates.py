"""How many tokens a second pass through a server."""

from __future__ import annotations

from collections import deque

from palestra.schemas.clock import Clock

WINDOW_SECONDS = 10


class TokenRate:
    """Tokens a second of the calls that ended in the last ten seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: deque[tuple[int, int]] = deque()  # (second, tokens of the calls that ended in it)

    def add(self, tokens: int) -> None:
        """A call of so many tokens has ended."""
        second = int(self._clock.monotonic())
        if self._ended and self._ended[-1][0] == second:
            tokens += self._ended.pop()[1]
        self._ended.append((second, tokens))
        while self._ended[0][0] <= second - WINDOW_SECONDS:
            self._ended.popleft()

    @property
    def per_second(self) -> float:
        """Prompt and reply tokens a second."""
        since = int(self._clock.monotonic()) - WINDOW_SECONDS
        return sum(tokens for second, tokens in list(self._ended) if second > since) / WINDOW_SECONDS
