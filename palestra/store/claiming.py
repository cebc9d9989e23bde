"""Claims: how a registered episode becomes a worker's, and the lock that weight syncs share with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select

from palestra.database import WAKE_SECONDS, Notifier, to_json
from palestra.database.sqlite import Prepared
from palestra.errors import ClaimOver
from palestra.store.casting import Casting
from palestra.store.codec import episode_of
from palestra.store.lifecycle import episode_by_id, set_state
from palestra.store.tables import episodes
from palestra.types.records import EpisodeKind, EpisodeRecord
from palestra.types.states import EpisodeState, check_transition

_BY_REQUEST = Prepared(select(episodes).where(episodes.c.claim_request_id == bindparam("request_id")))
_NEXT = Prepared(
    select(episodes)
    .where(episodes.c.state == EpisodeState.REGISTERED.value, episodes.c.kind == bindparam("kind"))
    .order_by(episodes.c.group_index, episodes.c.sample_index)
    .limit(1)
)
_CLAIMED = Prepared(select(func.count()).where(episodes.c.state == EpisodeState.CLAIMED.value))
CLAIM_ORDER: tuple[EpisodeKind, ...] = ("validation", "train")  # ad-hoc episodes are claimed by id only
_REGISTERED = episodes.alias()


def _first(kind: EpisodeKind) -> sa.ScalarSelect[Any]:
    """Return the id of the next registered episode of a kind as a subquery."""
    return (
        select(_REGISTERED.c.episode_id)
        .where(_REGISTERED.c.state == EpisodeState.REGISTERED.value, _REGISTERED.c.kind == kind)
        .order_by(_REGISTERED.c.group_index, _REGISTERED.c.sample_index)
        .limit(1)
        .scalar_subquery()
    )


# REGISTERED → CLAIMED of the next episode, for a job without limits of claims and without pools. If the claim's id is
# known, nothing is changed.
_TAKE_NEXT = Prepared(
    sa.update(episodes)
    .prefix_with("OR IGNORE")
    .where(
        episodes.c.episode_id == func.coalesce(*map(_first, CLAIM_ORDER)),
        # An episode that this claim took and gave back still has its id, so that no other row forbids the change.
        episodes.c.claim_request_id.is_distinct_from(bindparam("v_claim_request_id")),
    )
    .values(
        {name: bindparam(f"v_{name}") for name in ("worker_id", "claim_request_id", "lease_seconds", "claimed_at")}
        | {"state": EpisodeState.CLAIMED.value, "fence": episodes.c.fence + 1, "attempts": episodes.c.attempts + 1}
    )
    .returning(*episodes.c)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A worker's request for an episode.

    Attributes:
        request_id: a repeated claim with the same id gets the same episode.
        lease_seconds: stored with the episode for a restart.
        now: Unix seconds.
        episode_id: None: the next one.
    """

    worker_id: str
    request_id: str
    lease_seconds: float
    now: float
    episode_id: str | None = None


def take(
    connection: Connection, claim: Claim, most_claimed: int | None, casting: Casting | None = None
) -> EpisodeRecord | None:
    """Claim the next registered episode in canonical order, or a named one: REGISTERED → CLAIMED.

    Return None if none is available or a limit is reached.

    Args:
        most_claimed: limit over all workers together; None: unlimited.
        casting: None: no role has a pool.

    Raises:
        ClaimOver: the claim of this `request_id` is over.
        NotFound, IllegalTransition: the named episode does not exist, or is not registered.
    """
    changed: dict[str, Any] = {
        "worker_id": claim.worker_id,
        "claim_request_id": claim.request_id,
        "lease_seconds": claim.lease_seconds,
        "claimed_at": claim.now,
    }
    if claim.episode_id is None and most_claimed is None and casting is None:
        row = _TAKE_NEXT.row(connection, {f"v_{name}": value for name, value in changed.items()})
        if row is not None:
            return episode_of(row)
    known = _BY_REQUEST.row(connection, {"request_id": claim.request_id})
    if known is not None:
        if known.state != EpisodeState.CLAIMED:
            raise ClaimOver(
                f"the claim {claim.request_id!r} is over: episode {known.episode_id} is {known.state}; claim again"
            )
        return episode_of(known)
    if claim.episode_id is not None:
        found: EpisodeRecord | None = episode_by_id(connection, claim.episode_id)
    else:
        found = _next(connection)
    if found is None:
        return None
    check_transition(f"episode {found.episode_id}", found.state, EpisodeState.CLAIMED)
    if most_claimed is not None and number_claimed(connection) >= most_claimed:
        return None
    claimed = replace(
        found,
        state=EpisodeState.CLAIMED,
        fence=found.fence + 1,
        attempts=found.attempts + 1,
        worker_id=claim.worker_id,
        lease_seconds=claim.lease_seconds,
        players={} if casting is None else casting.players(connection, found),
    )
    changed |= {"fence": claimed.fence, "attempts": claimed.attempts}
    if claimed.players:
        changed["players"] = to_json(claimed.players)
    set_state(connection, found, EpisodeState.CLAIMED, changed)
    return claimed


def number_claimed(connection: Connection) -> int:
    """Return the number of claimed episodes of all workers."""
    return int(_CLAIMED.row(connection, {})[0])


def _next(connection: Connection) -> EpisodeRecord | None:
    """Return the next registered episode in canonical order, validation first, or None."""
    for kind in CLAIM_ORDER:
        row = _NEXT.row(connection, {"kind": kind})
        if row is not None:
            return episode_of(row)
    return None


class RolloutSyncLock:
    """A lock that rollouts share, and weight syncs hold alone.

    A rollout in any process holds it from its claim until the end of its lease. A waiting sync takes precedence over
    new claims.

    Attributes:
        released: notified when a rollout has released the lock.
        reopened: notified when episodes can be claimed again.
    """

    def __init__(self, rollouts: Callable[[], int], reopened: Notifier) -> None:
        self._rollouts, self.reopened, self.released = rollouts, reopened, Notifier()
        self._waiting = self._syncing = 0

    def refuses(self, episode_id: str | None) -> bool:
        """Return whether an episode cannot be claimed now.

        Claims by name are still allowed while a sync waits, because a rollout may play such an episode inside its own.
        """
        return self._syncing > 0 or (self._waiting > 0 and episode_id is None)

    @asynccontextmanager
    async def acquire_weight_sync(self) -> AsyncIterator[None]:
        """Refuse claims inside the block, which begins once no rollout holds the lock."""
        self._waiting += 1
        try:
            while self._rollouts():
                await self.released.wait(WAKE_SECONDS, self.released.count)
            self._syncing += 1
            try:
                yield
            finally:
                self._syncing -= 1
        finally:
            self._waiting -= 1
            self.reopened.notify()
