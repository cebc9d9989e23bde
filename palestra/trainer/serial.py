"""What all trainers have in common: policies with their versions, and requests one after another, each of them once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from palestra.errors import ConfigError, Expired, NotFound
from palestra.trainer.base import StepReport
from palestra.types.calls import FIRST_VERSION, PolicyVersion

T = TypeVar("T")
REMEMBERED = 64
REMEMBERED_BYTES = 64 * 2**20


class KnownRequests:
    """The newest 64 requests of each policy, by their ids.

    Long results (logprobs of a batch) are kept up to 64 MiB over all policies. For older requests only the id is kept:
    sending one again raises an error instead of executing it twice.
    """

    def __init__(self, most_bytes: int = REMEMBERED_BYTES) -> None:
        """Start empty. Results take at most `most_bytes`, over all policies; the newest is always kept."""
        self._known: OrderedDict[tuple[str, str], asyncio.Future[Any] | None] = OrderedDict()  # None: without result
        self._bytes: OrderedDict[tuple[str, str], int] = OrderedDict()  # of long results that are kept, oldest first
        self._most_bytes = most_bytes

    def find(self, policy: str, request_id: str) -> asyncio.Future[Any] | None:
        """Return the result of a request; None: unknown or failed, so it may be executed. Raises Expired: the request
        was executed, but its result was dropped.
        """
        key = (policy, request_id)
        if key not in self._known:
            return None
        found = self._known[key]
        if found is None:
            raise Expired(f"the request {request_id!r} was executed, and its result is not kept any more")
        if found.done() and (found.cancelled() or found.exception() is not None):
            return None
        return found

    def remember(self, policy: str, request_id: str, result: asyncio.Future[Any]) -> None:
        """Keep the result of a request."""
        self._known[policy, request_id] = result
        own = [key for key in self._known if key[0] == policy]
        for key in own[:-REMEMBERED]:
            self._drop(key)
        result.add_done_callback(partial(self._bound, (policy, request_id)))

    def forget(self, policy: str) -> None:
        """Forget the requests of a removed policy, so that a later policy of the same name starts without them."""
        for key in [key for key in self._known if key[0] == policy]:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        del self._known[key]
        self._bytes.pop(key, None)

    def _bound(self, key: tuple[str, str], result: asyncio.Future[Any]) -> None:
        """Count a result that has just come, and let go of the oldest that are too many."""
        if self._known.get(key) is not result or result.cancelled() or result.exception() is not None:
            return
        if size := _size(result.result()):
            self._bytes[key] = size
        total = sum(self._bytes.values())
        while total > self._most_bytes and len(self._bytes) > 1:
            oldest, size = self._bytes.popitem(last=False)
            self._known[oldest] = None
            total -= size


def _size(result: Any) -> int:
    """Return the bytes of the arrays in a result."""
    rows = result.logprobs if isinstance(result, StepReport) else None
    return sum(row.nbytes for row in rows or ())


class Serial:
    """Runs one piece of work at a time, in the order of the requests."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._known = KnownRequests()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` after all earlier work, and return its result.

        Cancelling the caller does not stop the work.
        """
        return await asyncio.shield(asyncio.ensure_future(self._locked(work)))

    async def run_idempotent(self, policy: str, request_id: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` unless this request is known; then return the result of its first run.

        A failed run may be repeated under its id. Cancelling the caller does not stop the work.
        """
        known = self._known.find(policy, request_id)
        if known is None:
            known = asyncio.ensure_future(self._locked(work))
            self._known.remember(policy, request_id, known)
        result: T = await asyncio.shield(known)
        return result

    def forget(self, policy: str) -> None:
        """Forget the requests of a removed policy, so that a later policy of the same name starts without them."""
        self._known.forget(policy)

    async def _locked(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` while no other work of this object runs."""
        async with self._lock:
            return await work()


class VersionedPolicy:
    """The version of a policy's master weights.

    Attributes:
        changed: whether the weights were updated since an engine last got them.
    """

    version = FIRST_VERSION
    changed = False

    def count_update(self) -> None:
        """Increment the version; all updates between two publications count once."""
        if not self.changed:
            self.version, self.changed = self.version.following, True

    def stored(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a checkpoint, with the version."""
        return {**state, "incarnation": self.version.incarnation, "n": self.version.n}

    def restore_version(self, state: Mapping[str, Any]) -> None:
        """Take over the version from the state of a checkpoint."""
        self.version = PolicyVersion(int(state["incarnation"]), int(state["n"]))


P = TypeVar("P", bound=VersionedPolicy)


class PolicyTrainer(Generic[P]):
    """A trainer's policies by name, and its requests."""

    def __init__(self) -> None:
        self._policies: dict[str, P] = {}
        self._serial = Serial()

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's master weights; see `Trainer.version`."""
        return self._policy(policy).version

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """Set the incarnation of a policy's later versions; see `Trainer.begin_incarnation`."""
        mine = self._policy(policy)
        mine.version = PolicyVersion(incarnation, mine.version.n)

    def _policy(self, policy: str) -> P:
        found = self._policies.get(policy)
        if found is None:
            raise NotFound(f"the trainer has no policy {policy!r}")
        return found

    def _check_new(self, policy: str) -> None:
        """Raise ConfigError if there is a policy of this name."""
        if policy in self._policies:
            raise ConfigError(f"the trainer has a policy {policy!r} already")
