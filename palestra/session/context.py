"""The objects that all sessions of a model server share."""

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
    """Everything that a session needs to sample from one policy.

    Attributes:
        config: of the policy.
        renderer: turns messages into ids and back.
        engine: samples.
        grammars: compiles the grammars of constrained replies.
    """

    config: PolicyConfig
    renderer: Renderer
    engine: Engine
    grammars: Grammars

    @property
    def token_bytes(self) -> Callable[[int], bytes]:
        """Return a function from a token to its bytes, also for control tokens."""
        return self.renderer.vocabulary.bytes_of


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
    policies: Mapping[str, PolicyRuntime]
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
    def policy_name(self) -> str:
        """Return the name of the policy with which the job's episodes are played."""
        (name,) = self.policies
        return name

    @property
    def clock(self) -> Clock:
        """Return the clock of the store, which all times of calls come from."""
        return self.store.clock

    def runtime(self, policy: str) -> PolicyRuntime:
        """Return the runtime of a policy by its name.

        Raises:
            NotFound: there is no such policy.
        """
        runtime = self.policies.get(policy)
        if runtime is None:
            raise NotFound(f"there is no model {policy!r} here; this job has {', '.join(map(repr, self.policies))}")
        return runtime

    def count(self, chat: Chat) -> None:
        """Add a recorded call to the counters."""
        self.counts["calls"] += 1
        self.counts["prompt_tokens"] += chat.prompt_tokens
        self.counts["completion_tokens"] += len(chat.completion_ids)
        self.rate.add(chat.tokens)
        self.counts["reused_prompt_tokens"] += chat.shared
        if chat.fork is not None:
            self.counts[f"forks_{chat.fork.reason.value}"] += 1
