"""The objects that all sessions of a model server share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from palestra.ledger import RunStore
from palestra.schemas.clock import Clock
from palestra.schemas.records import Chat
from palestra.session.counters import StateTimes, TokenRate
from palestra.session.history import EXACT, Sameness
from palestra.session.policies import PolicySet
from palestra.threads import WorkPool


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
        pool: threads for work that would block the event loop.
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
    pool: WorkPool = field(default_factory=WorkPool)
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

    def count(self, chat: Chat) -> None:
        """Add a recorded call to the counters."""
        self.counts["calls"] += 1
        self.counts["prompt_tokens"] += chat.prompt_tokens
        self.counts["completion_tokens"] += len(chat.completion_ids)
        self.rate.add(chat.tokens)
        self.counts["reused_prompt_tokens"] += chat.shared
        if chat.fork is not None:
            self.counts[f"forks_{chat.fork.reason.value}"] += 1
