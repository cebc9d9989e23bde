"""A queue of training requests of many tenants in front of one trainer.

The queue gives the trainer one pass at a time: one micro-batch, or one micro-batch each of several policies on the same
base. So a request of many micro-batches is computed in pieces, and other tenants get their turn in between. Requests
about one policy are computed in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from palestra.errors import ConfigError, NotFound
from palestra.trainer.serial import KnownRequests
from palestra_bases.training.pieces import Pieces
from palestra_bases.training.shares import FairShares, QueueLoad, TenantLoad

if TYPE_CHECKING:
    from palestra_bases.training.shared_trainer import SharedTrainer

QUANTUM_PASSES = 4  # passes that a tenant of weight 1 may fill in a round
REQUEST_TOKENS = 16  # charged for a request that is no pass: an update takes about as long
# Seconds for which the queue waits, after a gradient, for the next request about the policy. Without them the update
# of a learner that sends it when it has the gradient's report would stand behind the next piece of another.
PAUSE = 0.02


@dataclass(slots=True, eq=False)
class Queued:
    """A request that waits or is being computed."""

    tenant: str
    policy: str
    number: int = field(default=-1, kw_only=True)
    since: float = field(default=0.0, kw_only=True)
    result: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), kw_only=True
    )


@dataclass(slots=True, eq=False)
class QueuedCall(Queued):
    """A request executed as a whole."""

    call: Callable[[], Awaitable[Any]]


@dataclass(slots=True, eq=False)
class QueuedPieces(QueuedCall):
    """A request that is computed in pieces, which `call` returns.

    Attributes:
        pieces: the remaining ones; None: `call` was not awaited yet.
    """

    pieces: Pieces[Any] | None = None


class TrainingQueue:
    """Executes the requests of tenants with one trainer; each tenant gets its share of the tokens."""

    def __init__(
        self,
        trainer: SharedTrainer,
        shares: FairShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put a queue in front of a trainer, which gets no other requests. `shares` = None: four passes a round."""
        self.trainer = trainer
        self._shares = shares or FairShares(QUANTUM_PASSES * trainer.micro_batch_tokens)
        self._clock = clock
        self._tenants: dict[str, TenantLoad] = {}
        self._policies: dict[str, str] = {}  # of the trainer, with their tenants
        self._lines: dict[str, deque[Queued]] = {}  # by policy; none is empty
        self._known = KnownRequests()
        self._expected, self._came = set[str](), asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._numbers, self._passes, self._merged = 0, 0, 0

    def add_tenant(self, tenant: str, weight: float = 1.0) -> None:
        """Add a tenant, or change its weight. `weight`: relative share of the tokens."""
        if not tenant or "/" in tenant:
            raise ConfigError(f"a tenant can't be called {tenant!r}: names are not empty, and have no /")
        if not 0 < weight < float("inf"):
            raise ConfigError(f"the weight of the tenant {tenant!r} is {weight:g}, and has to be positive")
        self._shares.add(tenant, weight)
        known = self._tenants.get(tenant, TenantLoad(tenant=tenant, weight=weight))
        self._tenants[tenant] = replace(known, weight=weight)

    async def remove_tenant(self, tenant: str) -> None:
        """Remove a tenant and its policies, even during its requests; waiting requests fail."""
        self._check(tenant)
        del self._tenants[tenant]
        policies = set(self.policies(tenant))
        for policy, line in list(self._lines.items()):
            if line[0].tenant == tenant:
                policies.add(policy)  # which may be about to be created
                for request in list(line):
                    self._fail(request, NotFound(f"the tenant {tenant!r} was removed"))
        removals = [QueuedCall(tenant, policy, self._removal(policy)) for policy in sorted(policies)]
        for removal in removals:
            self._known.forget(removal.policy)
            self._append(removal)
        ended = asyncio.gather(*(removal.result for removal in removals), return_exceptions=True)
        for failure in await asyncio.shield(ended):
            if failure is not None and not isinstance(failure, NotFound):  # a policy that was never created
                raise failure
        waits = any(line[0].tenant == tenant for line in self._lines.values())
        if tenant not in self._tenants and not waits:  # no tenant has come back under the name, or is being removed
            self._shares.remove(tenant)

    def submit(self, request: Queued, request_id: str | None = None) -> asyncio.Future[Any]:
        """Queue a request, and return its result.

        Callers must shield it: cancelling them must not cancel the result. A known `request_id` returns the first
        request's result, unless that failed. `request_id` = None: always a new request.
        """
        self._check(request.tenant)
        if request_id is not None:
            if (known := self._known.find(request.policy, request_id)) is not None:
                return known
            self._known.remember(request.policy, request_id, request.result)
        self._append(request)
        return request.result

    def submit_creation(self, request: QueuedCall) -> asyncio.Future[Any]:
        """Queue a request that creates a policy; see `submit`."""
        create = request.call

        async def call() -> None:
            await create()
            self._policies[request.policy] = request.tenant

        request.call = call
        return self.submit(request)

    def submit_removal(self, tenant: str, policy: str) -> asyncio.Future[Any]:
        """Queue the removal of a policy, and forget the ids of its earlier requests."""
        result = self.submit(QueuedCall(tenant, policy, self._removal(policy)))
        self._known.forget(policy)
        return result

    def policies(self, tenant: str) -> list[str]:
        """Return a tenant's policies, by their names in the trainer."""
        return [policy for policy, owner in self._policies.items() if owner == tenant]

    def load(self) -> QueueLoad:
        """Return the waiting requests, and the tokens computed for each tenant."""
        now, waiting = self._clock(), [request for line in self._lines.values() for request in line]
        waits = {name: [now - one.since for one in waiting if one.tenant == name] for name in self._tenants}
        tenants = (
            replace(known, waiting=len(waits[name]), longest_wait=max(waits[name], default=0.0))
            for name, known in self._tenants.items()
        )
        return QueueLoad(tenants=tuple(tenants), passes=self._passes, merged_passes=self._merged)

    async def close(self) -> None:
        """Compute everything that waits, and close the trainer."""
        if self._working is not None:
            await asyncio.shield(self._working)
        await self.trainer.close()

    def _check(self, tenant: str) -> None:
        if tenant not in self._tenants:
            raise NotFound(f"there is no tenant {tenant!r}")

    def _removal(self, policy: str) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            await self.trainer.remove(policy)
            self._policies.pop(policy, None)

        return call

    def _append(self, request: Queued) -> None:
        """Put a request behind the others about its policy, and have the queue work."""
        self._numbers += 1
        request.number, request.since = self._numbers, self._clock()
        request.result.add_done_callback(_retrieve)
        self._lines.setdefault(request.policy, deque()).append(request)
        self._expected.discard(request.policy)
        if not self._expected:
            self._came.set()
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(), name="palestra-training-queue")

    async def _work(self) -> None:
        try:
            while self._lines:
                heads = sorted((line[0] for line in self._lines.values()), key=lambda head: head.number)
                tenant = self._shares.choose(list(dict.fromkeys(head.tenant for head in heads)))
                first = next(head for head in heads if head.tenant == tenant)
                if isinstance(first, QueuedPieces):
                    await self._compute_pass(first, heads)
                elif isinstance(first, QueuedCall):
                    self._charge([first], REQUEST_TOKENS)
                    await self._finish(first)
        except BaseException as error:  # a fault of the queue's own, or the event loop ends: no other task will answer
            for request in [request for line in self._lines.values() for request in line]:
                if isinstance(error, Exception):
                    self._fail(request, error)
                else:
                    request.result.cancel()
            self._lines.clear()
            raise

    async def _compute_pass(self, first: QueuedPieces, heads: Sequence[Queued]) -> None:
        """Compute the next piece of a request, and in the same pass fitting pieces of other requests."""
        pieces = await self._begin(first)
        if pieces is None:
            return
        parts = await self._joined(first, pieces, heads)
        if not parts:
            return
        for part, pieces in parts:
            self._charge([part], pieces.tokens)
        self._passes += 1
        self._merged += len(parts) > 1
        try:
            failures = await self.trainer.compute({part.policy: pieces for part, pieces in parts})
        except Exception as error:  # noqa: BLE001 - the requests fail, and the queue goes on
            failures = {part.policy: error for part, _ in parts}
        ended = list[str]()
        for part, pieces in parts:
            if part.policy in failures:
                self._fail(part, failures[part.policy])
            elif not pieces.tokens:
                self._answer(part, pieces.result())
                ended.append(part.policy)
        await self._pause_for(ended)

    async def _begin(self, request: QueuedPieces) -> Pieces[Any] | None:
        """Return the pieces of a request; None: nothing to compute, or creating them failed."""
        if request.pieces is None:
            try:
                request.pieces = await request.call()
            except Exception as error:  # noqa: BLE001 - the request fails, and the queue goes on
                self._charge([request], REQUEST_TOKENS)
                self._fail(request, error)
                return None
        if request.result.done():  # its tenant was removed
            return None
        if not request.pieces.tokens:  # a batch without rows
            self._charge([request], REQUEST_TOKENS)
            self._answer(request, request.pieces.result())
            return None
        return request.pieces

    async def _joined(
        self, first: QueuedPieces, its: Pieces[Any], heads: Sequence[Queued]
    ) -> list[tuple[QueuedPieces, Pieces[Any]]]:
        """Return the requests of one pass with their pieces: `first`, and fitting ones in order of arrival."""
        parts, base, tokens = [(first, its)], its.base, its.tokens
        if base is None:
            return parts
        for head in heads:
            if len(parts) == self.trainer.most_together or tokens >= self.trainer.micro_batch_tokens:
                break
            if head is first or not isinstance(head, QueuedPieces) or not self._shares.may_use(head.tenant):
                continue
            pieces = await self._begin(head)
            if pieces and pieces.base is base and tokens + pieces.tokens <= self.trainer.micro_batch_tokens:
                parts.append((head, pieces))
                tokens += pieces.tokens
        return [part for part in parts if not part[0].result.done()]  # a tenant may have been removed meanwhile

    async def _finish(self, request: QueuedCall) -> None:
        try:
            found = await request.call()
        except Exception as error:  # noqa: BLE001 - the request fails, and the queue goes on
            self._fail(request, error)
        else:
            self._answer(request, found)

    def _charge(self, requests: Iterable[Queued], tokens: int) -> None:
        for request in requests:
            self._shares.charge(request.tenant, tokens)
            if (known := self._tenants.get(request.tenant)) is not None:
                self._tenants[request.tenant] = replace(known, tokens=known.tokens + tokens)

    def _answer(self, request: Queued, result: Any) -> None:
        self._leave(request)
        if not request.result.done():
            request.result.set_result(result)

    def _fail(self, request: Queued, error: Exception) -> None:
        self._leave(request)
        if not request.result.done():
            request.result.set_exception(error)

    def _leave(self, request: Queued) -> None:
        """Remove a request from its queue, unless that was dropped with its tenant."""
        line = self._lines.get(request.policy)
        if line is not None and line[0] is request:
            line.popleft()
            if not line:
                del self._lines[request.policy]

    async def _pause_for(self, policies: Iterable[str]) -> None:
        """Wait a moment for the next requests about policies that have just got a gradient, unless they are there."""
        self._expected = {policy for policy in policies if policy not in self._lines}
        if self._expected:
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await self._came.wait()
            self._expected = set()


def _retrieve(result: asyncio.Future[Any]) -> None:
    """Retrieve the error of a request whose caller may have left, so that asyncio does not log it."""
    if not result.cancelled():
        result.exception()
