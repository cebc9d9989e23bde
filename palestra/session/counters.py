"""Counters over all calls of a server: tokens a second, and the time spent in each state of a call."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from palestra.schemas.clock import Clock
from palestra.schemas.states import TurnState

WINDOW_SECONDS = 10


class TokenRate:
    """Counts the tokens of the calls that ended in the last ten seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: deque[tuple[int, int]] = deque()  # (second, tokens of the calls that ended in it)

    def add(self, tokens: int) -> None:
        """Count the tokens of a call that has ended now."""
        second = int(self._clock.monotonic())
        if self._ended and self._ended[-1][0] == second:
            tokens += self._ended.pop()[1]
        self._ended.append((second, tokens))
        while self._ended[0][0] <= second - WINDOW_SECONDS:
            self._ended.popleft()

    @property
    def per_second(self) -> float:
        """Return prompt and reply tokens a second, over the last ten seconds."""
        since = int(self._clock.monotonic()) - WINDOW_SECONDS
        return sum(tokens for second, tokens in list(self._ended) if second > since) / WINDOW_SECONDS


class StateTimes:
    """Time spent in each state, over all calls of a server. Calls that are in a state count up to now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Sum of (leave - enter) for calls that have left the state, minus the enter times of those that are in it.
        self._since: defaultdict[TurnState, float] = defaultdict(float)
        self._inside: Counter[TurnState] = Counter()

    def enter(self, state: TurnState) -> None:
        """Count a call that enters a state now."""
        self._since[state] -= self._clock.monotonic()
        self._inside[state] += 1

    def leave(self, state: TurnState) -> None:
        """Count a call that leaves a state now."""
        self._since[state] += self._clock.monotonic()
        self._inside[state] -= 1

    @property
    def seconds(self) -> dict[TurnState, float]:
        """Return the seconds spent in each state that was ever entered."""
        now = self._clock.monotonic()
        return {state: since + self._inside[state] * now for state, since in list(self._since.items())}
