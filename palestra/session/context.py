"""State shared by all sessions of a model server: policies, limits, and counters."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from palestra.session.history import EXACT, Sameness
from palestra.session.policies import PolicySet
from palestra.store import RunStore
from palestra.store.spending import Metering
from palestra.threads import WorkPool
from palestra.types.calls import Chat
from palestra.types.clock import Clock
from palestra.types.states import TurnState

WINDOW_SECONDS = 10


class TokenRate:
    """Counts the tokens of calls that ended in the last ten seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: deque[tuple[int, int]] = deque()  # (second, tokens of the calls that ended in it)

    def add(self, tokens: int) -> None:
        """Count the tokens of a call that has just ended."""
        second = int(self._clock.monotonic())
        if self._ended and self._ended[-1][0] == second:
            tokens += self._ended.pop()[1]
        self._ended.append((second, tokens))
        while self._ended[0][0] <= second - WINDOW_SECONDS:
            self._ended.popleft()

    @property
    def per_second(self) -> float:
        """Return prompt and reply tokens per second over the last ten seconds."""
        since = int(self._clock.monotonic()) - WINDOW_SECONDS
        return sum(tokens for second, tokens in list(self._ended) if second > since) / WINDOW_SECONDS


class StateTimes:
    """Time spent in each state, summed over all calls of a server, including running ones."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Sum of (leave - enter) for calls that have left the state, minus the enter times of those that are in it.
        self._since: defaultdict[TurnState, float] = defaultdict(float)
        self._inside: Counter[TurnState] = Counter()

    def move(self, left: TurnState | None, entered: TurnState | None) -> None:
        """Count a call that leaves a state now, and enters another; None: no state whose time is measured."""
        now = self._clock.monotonic()
        if left is not None:
            self._since[left] += now
            self._inside[left] -= 1
        if entered is not None:
            self._since[entered] -= now
            self._inside[entered] += 1

    @property
    def seconds(self) -> dict[TurnState, float]:
        """Return the seconds spent in each state that was ever entered."""
        now = self._clock.monotonic()
        return {state: since + self._inside[state] * now for state, since in list(self._since.items())}


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionContext:
    """Store, policies, the job's seed, and the counters of `/status` and `/metrics`.

    Attributes:
        strict_history: refuse calls that would lose exact tokens of an earlier call.
        ignore_untrainable: ignore sampling fields that training does not allow, instead of refusing them.
        sameness: changes of a reply after which a call still continues from its exact ids.
        seats: roles of external players, whose calls share no history with other agents'.
        pool: threads for work that would block the event loop.
        picture_pool: threads that decode pictures, separate so that pictures do not delay other requests.
        counts: calls, tokens and forks since the start.
        metering: counts what calls use, within the job's budget; None: nothing is counted.
        times: seconds in each state, over all calls.
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
    metering: Metering | None = None
    times: StateTimes = field(init=False)
    rate: TokenRate = field(init=False)

    def __post_init__(self) -> None:
        # The class is frozen, and these two need the store's clock.
        object.__setattr__(self, "times", StateTimes(self.store.clock))
        object.__setattr__(self, "rate", TokenRate(self.store.clock))

    @property
    def clock(self) -> Clock:
        """Return the store's clock, the source of all call times."""
        return self.store.clock

    def seat_of(self, agent: str) -> str:
        """Return the player slot of an agent or of its parent; empty: it has none."""
        root = agent.partition("/")[0]
        return root if root in self.seats else ""

    def count(self, chat: Chat) -> None:
        """Add a recorded call to the counters."""
        counts, prompt, reply = self.counts, chat.prompt_tokens, len(chat.completion_ids)
        counts["calls"] += 1
        counts["prompt_tokens"] += prompt
        counts["completion_tokens"] += reply
        self.rate.add(prompt + reply)
        counts["reused_prompt_tokens"] += chat.shared
        if chat.fork is not None:
            self.counts[f"forks_{chat.fork.reason.value}"] += 1
