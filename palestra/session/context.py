"""What all sessions of a model server share: policies, limits, and counters of tokens and of time by state."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from palestra.session.history import EXACT, Sameness
from palestra.session.policies import PolicySet
from palestra.store import RunStore
from palestra.threads import WorkPool
from palestra.types.calls import Chat
from palestra.types.clock import Clock
from palestra.types.states import TurnState

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionContext:
    """Store, policies, the job's seed, and the counters that `/status` and `/metrics` show.

    Attributes:
        store: where calls are recorded.
        policies: by name.
        seed: of the job.
        strict_history: whether a call that would lose exact tokens of an earlier one is refused.
        ignore_untrainable: whether sampling fields that training can't have are ignored and not refused.
        sameness: changes of a reply after which a call still continues from its exact ids.
        seats: agents that workers of their own play; what one says and is shown, no other may find out.
        pool: threads for work that would block the event loop.
        picture_pool: threads that decode pictures, so that no number of them keeps other requests waiting.
        counts: of calls, tokens and forks, since the start.
        times: seconds spent in each state, over all calls.
        rate: tokens a second of the last ten seconds.
    """

    store: RunStore
    policies: PolicySet
    seed: int
    strict_history: bool = False
    ignore_untrainable: bool = False
    sameness: Sameness = EXACT
    seats: frozenset[str] = frozenset()
    pool: WorkPool = field(default_factory=WorkPool)
    picture_pool: WorkPool = field(default_factory=WorkPool)
    counts: Counter[str] = field(default_factory=Counter)
    times: StateTimes = field(init=False)
    rate: TokenRate = field(init=False)

    def __post_init__(self) -> None:
        # The class is frozen, and these two need the store's clock.
        object.__setattr__(self, "times", StateTimes(self.store.clock))
        object.__setattr__(self, "rate", TokenRate(self.store.clock))

    @property
    def clock(self) -> Clock:
        """Return the clock of the store, which all times of calls come from."""
        return self.store.clock

    def seat_of(self, agent: str) -> str:
        """Return the seat of an agent or of its parent; empty: it has none."""
        root = agent.partition("/")[0]
        return root if root in self.seats else ""

    def count(self, chat: Chat) -> None:
        """Add a recorded call to the counters."""
        self.counts["calls"] += 1
        self.counts["prompt_tokens"] += chat.prompt_tokens
        self.counts["completion_tokens"] += len(chat.completion_ids)
        self.rate.add(chat.tokens)
        self.counts["reused_prompt_tokens"] += chat.shared
        if chat.fork is not None:
            self.counts[f"forks_{chat.fork.reason.value}"] += 1
