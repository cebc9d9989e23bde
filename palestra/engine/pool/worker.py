"""One inference worker of a pool: its engine, its requests, and its weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from palestra.engine.base import Engine, EngineLoad, WorkerLoad
from palestra.engine.pool.placement import Candidate, PrefixIndex
from palestra.engine.pool.state import WantedPolicy, leftover, missing
from palestra.errors import EngineFailure, ModelError, PalestraError
from palestra.types.calls import FIRST_VERSION, PolicyVersion
from palestra.waiting import together

GRACE_SECONDS = 0.5  # between the failure of a request and the news that its whole worker has failed


class WorkerState(StrEnum):
    """A worker's life cycle; a dead worker is starting again."""

    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that was started.

    Attributes:
        engine: its `failure` returns when the worker has died.
        kill: ends even a stuck worker immediately; all calls of its engine fail then.
        process: pid; None: no process on this machine.
        found: whether it was already running, so that only its owner can restart it.
    """

    engine: Engine
    kill: Callable[[], None]
    process: int | None = None
    found: bool = False


class InferenceWorker:
    """A worker number of a pool, filled by a worker and its replacements."""

    def __init__(
        self, number: int, prefix_tokens: int, stuck_seconds: float, kind: str = "", *, later: bool = False
    ) -> None:
        """Create it without a worker. A worker with work but no progress for `stuck_seconds` is stuck. `kind` names one
        of several kinds in a pool; `later`: it was added to a running pool.
        """
        self.kind, self.later = kind, later
        self.number, self._stuck_seconds, self._prefix_tokens = number, stuck_seconds, prefix_tokens
        self.engine: Engine | None = None
        self.process: int | None = None
        self.found = False  # see `StartedWorker`
        self.prefixes = PrefixIndex(prefix_tokens)
        self.requests = 0  # that are being answered
        self.restarts = 0
        self.refused: WantedPolicy | None = None  # the last policy whose weights it could not take
        self.problem: PalestraError | None = None  # why a worker that was added did not come to serve
        self.is_ready = self.is_draining = self.has_served = False
        self.served_since: float | None = None  # monotonic time; None: not since its last start
        self._left = asyncio.Event()
        self._calls = 0  # other calls that it is answering: updates, scores
        self._answered = 0  # such calls that it has answered
        self._updates = 0
        self._have: dict[str, WantedPolicy] = {}
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._taking = asyncio.Lock()
        self.before = EngineLoad(waiting=0, running=0)  # what earlier workers of this place have done

    @property
    def name(self) -> str:
        """Return the worker's name in logs and messages."""
        return f"inference worker {self.number}" + (f" ({self.kind})" if self.kind else "")

    @property
    def serves(self) -> bool:
        """Return whether the worker takes new requests."""
        return self.is_ready and not self.is_draining and not self._lost.done()

    # Life

    def begin(self, started: StartedWorker) -> None:
        """Attach a started worker, which has the initial weights."""
        self.engine, self.process, self.found = started.engine, started.process, started.found
        self.prefixes = PrefixIndex(self._prefix_tokens)
        self._have, self._taking = {}, asyncio.Lock()
        self._lost = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Detach a worker that has ended."""
        if self.engine is not None:
            self.before = added_loads(self.before, self.engine.load())
        self.engine, self.process, self.is_ready = None, None, False
        self.lose("it was ended")

    def lose(self, why: str) -> None:
        """Give the worker up, so that the pool replaces it; the first reason counts."""
        if not self._lost.done():
            self._lost.set_result(why)

    async def lost(self) -> str:
        """Wait until the worker is given up, and return the reason."""
        return await asyncio.shield(self._lost)

    async def has_failed(self, engine: Engine) -> bool:
        """Return whether a call failed because of the worker, not because of the call. `engine` answered the call; a
        replacement has another one.
        """
        if self.engine is not engine:
            return True
        await asyncio.wait((self._lost,), timeout=GRACE_SECONDS)
        return self.engine is not engine or self._lost.done()

    async def stuck(self, is_paused: Callable[[], bool]) -> str:
        """Wait until the worker has had work without progress for `stuck_seconds`, and return a description.

        A stopped or deadlocked worker keeps its socket open, so only progress counts: forward passes, tokens, received
        weights, and answers to calls. A paused worker must answer calls, but not requests.
        """
        seen, since = self._progress(), time.monotonic()
        while True:
            await asyncio.sleep(min(self._stuck_seconds / 4, 1.0))
            progress = self._progress()
            has_work = self._calls > 0 or (self.requests > 0 and not is_paused())
            if progress != seen or not has_work:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since >= self._stuck_seconds:
                return f"has made no progress for {self._stuck_seconds:g} s with {self.requests} requests"

    def _progress(self) -> tuple[int, ...]:
        assert self.engine is not None
        load = self.engine.load()
        return load.passes, load.prefilled_tokens, load.sampled_tokens, load.moved_bytes, self._answered

    def drain(self) -> None:
        """Take no more requests, and leave when the present ones have ended."""
        self.is_draining = True
        self._look_left()

    async def left(self) -> None:
        """Wait until the worker was drained and has no request."""
        await self._left.wait()

    def _look_left(self) -> None:
        if self.is_draining and not self.requests:
            self._left.set()

    # Requests and calls

    @property
    def calls(self) -> int:
        """Return the number of calls being answered, including requests."""
        return self.requests + self._calls

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request of this worker while the block runs."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self._look_left()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count another call, such as an update, while the block runs."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._answered += 1

    def candidate(self, policy: str, hashes: list[int]) -> Candidate:
        """Return this worker's state for `place_request`. `hashes` are those of the prompt; see `block_hashes`."""
        return Candidate(
            known=self.prefixes.known(policy, hashes),
            requests=self.requests,
            version=self.version(policy),
            updating=self._updates > 0,
        )

    # Weights

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's weights in this worker."""
        known = self._have.get(policy)
        return FIRST_VERSION if known is None else known.version

    def lacks(self, wanted: Mapping[str, WantedPolicy]) -> bool:
        """Return whether the worker still has to take or remove a policy; see `take`."""
        return bool(missing(wanted, self._have) or leftover(wanted, self._have))

    async def take(self, wanted: Mapping[str, WantedPolicy]) -> None:
        """Bring the worker's policies up to date. Changes of `wanted` during the call are applied too."""
        engine = self.engine
        if engine is None:
            raise EngineFailure(f"{self.name} has died")
        self._updates += 1
        try:
            async with self._taking:
                while self.lacks(wanted):
                    for name in leftover(wanted, self._have):
                        with self.answering():
                            await engine.remove_policy(name)
                        self._have.pop(name, None)
                        self.prefixes.clear(name)
                    due = missing(wanted, self._have)
                    for policy in due:
                        if policy.weights is None:
                            await self._take(engine, policy)
                    await together(*(self._take(engine, policy) for policy in due if policy.weights is not None))
        finally:
            self._updates -= 1

    async def _take(self, engine: Engine, policy: WantedPolicy) -> None:
        source = None if policy.weights is None else policy.weights.source
        with self.answering():
            try:
                if policy.like is not None:
                    await engine.add_policy(policy.name, policy.like, policy.version, source)
                else:
                    assert source is not None
                    await engine.sync_weights(policy.name, policy.version, source)
            except ModelError:
                self.refused = policy
                raise
        self._have[policy.name] = policy
        self.prefixes.clear(policy.name)

    # What others see

    @property
    def state(self) -> WorkerState:
        """Return the worker's state."""
        if not self.is_ready:
            return WorkerState.STARTING
        if self.is_draining:
            return WorkerState.DRAINING
        return WorkerState.UPDATING if self._updates else WorkerState.READY

    @property
    def own_load(self) -> EngineLoad:
        """Return the present worker's load, with counters that include earlier workers."""
        now = EngineLoad(waiting=0, running=0) if self.engine is None else self.engine.load()
        return added_loads(now, self.before)

    def view(self) -> WorkerLoad:
        """Return what `/status` shows of this worker."""
        return WorkerLoad(
            name=self.name,
            state=self.state.value,
            requests=self.requests,
            restarts=self.restarts,
            process=self.process,
            versions={name: str(policy.version) for name, policy in self._have.items()},
        )


def added_loads(now: EngineLoad, before: EngineLoad) -> EngineLoad:
    """Return a load whose counters include those of another one."""
    return EngineLoad(
        waiting=now.waiting,
        running=now.running,
        kv_bytes_used=now.kv_bytes_used,
        kv_bytes=now.kv_bytes,
        passes=now.passes + before.passes,
        prefilled_tokens=now.prefilled_tokens + before.prefilled_tokens,
        sampled_tokens=now.sampled_tokens + before.sampled_tokens,
        moved_bytes=now.moved_bytes + before.moved_bytes,
    )
