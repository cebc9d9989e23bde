"""What all sessions of a model server share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from palestra.chat import Renderer
from palestra.config import PolicyConfig
from palestra.errors import NotFound
from palestra.grammars.pool import Grammars
from palestra.inference.base import Engine
from palestra.ledger import RunStore
from palestra.schemas.clock import Clock
from palestra.schemas.records import Chat
from palestra.session.counters import StateTimes, TokenRate
from palestra.session.history import EXACT, Sameness
from palestra.threads import WorkPool


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRuntime:
    """What a session needs of one policy."""

    config: PolicyConfig
    renderer: Renderer
    engine: Engine
    grammars: Grammars

    @property
    def token_bytes(self) -> Callable[[int], bytes]:
        """The bytes of each token, control tokens included."""
        return self.renderer.vocabulary.bytes_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionContext:
    """Store, policies, the job's seed, and the counters that `/status` and `/metrics` show."""

    store: RunStore
    policies: Mapping[str, PolicyRuntime]
    seed: int
    strict_history: bool = False  # refuse a call that would lose exact tokens of an earlier one
    ignore_untrainable: bool = False  # leave out sampling fields that training can't have, instead of refusing them
    sameness: Sameness = EXACT  # changes of a reply after which a call goes on with its exact ids
    pool: WorkPool = field(default_factory=WorkPool)  # for what would hold up the event loop
    counts: Counter[str] = field(default_factory=Counter)
    times: StateTimes = field(init=False)  # spent in each state, over all calls
    rate: TokenRate = field(init=False)  # of late

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", StateTimes(self.store.clock))  # frozen, and of the same clock
        object.__setattr__(self, "rate", TokenRate(self.store.clock))

    @property
    def policy_name(self) -> str:
        """The name of the policy that the job's episodes are played with."""
        (name,) = self.policies
        return name

    @property
    def clock(self) -> Clock:
        """The store's clock."""
        return self.store.clock

    def runtime(self, policy: str) -> PolicyRuntime:
        """A policy by name.

        Raises:
            NotFound: no such policy.
        """
        runtime = self.policies.get(policy)
        if runtime is None:
            raise NotFound(f"there is no model {policy!r} here; this job has {', '.join(map(repr, self.policies))}")
        return runtime

    def count(self, chat: Chat) -> None:
        """Add a finished call to the counters."""
        self.counts["calls"] += 1
        self.counts["prompt_tokens"] += chat.prompt_tokens
        self.counts["completion_tokens"] += len(chat.completion_ids)
        self.rate.add(chat.tokens)
        self.counts["reused_prompt_tokens"] += chat.shared
        if chat.fork is not None:
            self.counts[f"forks_{chat.fork.reason.value}"] += 1
