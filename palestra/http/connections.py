"""The connections of a server: their limit, and which of them are closed first.

Without a limit, idle clients use up the process's descriptors, and the job can open no file any more. The limit counts
all connections instead of each address, because behind a proxy all clients have the same address.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from palestra.errors import TooManyRequests

log = logging.getLogger("palestra.http")
MOST_CONNECTIONS = 8192  # an idle connection takes about 10 KiB
FEWEST_CONNECTIONS = 16
RESERVED_DESCRIPTORS = 64  # kept for the files that a running job opens: metrics, checkpoints, the store's
MOST_DESCRIPTORS = 1 << 20  # used if there is no hard limit
LONGEST_BACKLOG = 4096
LOG_SECONDS = 60.0
AGAIN_SECONDS = 5.0  # after which a client that would have waited for something may ask again


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """The limits of one connection.

    Attributes:
        header_bytes: of request line and headers together.
        header_seconds: from the first byte of a request, or from the connection, to the end of its headers.
        stalled_seconds: while the client does not read waiting answers.
        pipelined: requests that may wait behind the current one.
    """

    connections: int = MOST_CONNECTIONS
    header_bytes: int = 16_384
    header_fields: int = 200
    header_seconds: float = 20.0
    idle_seconds: float = 75.0
    stalled_seconds: float = 60.0
    pipelined: int = 16


class Connection(Protocol):
    """A connection that can be closed; see `palestra.http.protocol` for HTTP.

    Attributes:
        known: whether one of its requests had a valid key.
        until: deadline, in seconds of `time.monotonic`.
    """

    known: bool
    until: float

    @property
    def flushed(self) -> bool:
        """Return whether the client has read everything sent to it."""
        ...

    def expire(self) -> None:
        """Close the connection after its deadline."""
        ...

    def close(self) -> None:
        """Close the connection immediately."""
        ...


class Connections:
    """All connections of a server; closes slow ones, and others when there are too many.

    A connection is *waiting* if no request on it is being answered, or if its client does not read the answer. If there
    are too many connections, waiting ones are closed: first those without a valid key, longest waiting first. A
    connection with a request being answered is not closed, nor one with a valid key and an unread answer.

    Attributes:
        counts: accepted, refused and closed connections, by reason, for `/metrics`.
        open: every open connection, including WebSockets.
    """

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self.counts: Counter[str] = Counter()
        self.open: Collection[object] = ()
        self._strangers: dict[Connection, None] = {}  # waiting, without a good key; longest first
        self._known: dict[Connection, None] = {}
        self._advice = (
            "a server has no more; have fewer workers play more episodes each (palestra worker --concurrency)"
        )
        self._logged_at = -LOG_SECONDS
        self._logged: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return how many connections are open."""
        return len(self.open)

    @property
    def in_use(self) -> int:
        """Return on how many connections a request is being answered."""
        return len(self.open) - len(self._strangers) - len(self._known)

    def fit_descriptors(self) -> None:
        """Raise the process's descriptor limit as far as allowed, and limit the connections accordingly."""
        soft = raise_descriptor_limit()
        # The event loop accepts all that wait before it counts the first, and again before the first is closed.
        taken = len(os.listdir("/proc/self/fd")) + RESERVED_DESCRIPTORS + 2 * backlog()
        room = max(soft - taken, FEWEST_CONNECTIONS)
        if room < self.limits.connections:
            self.limits = replace(self.limits, connections=room)
            self._advice = f"the limit of {soft} open files (ulimit -n) allows no more; raise it"

    def check_capacity(self) -> None:
        """Raise TooManyRequests for a request that would wait, if nearly all connections are in use.

        This reserves some connections for requests that are answered immediately.
        """
        most = self.limits.connections
        if self.in_use > most - max(1, most // 16):
            self.counts["waits_refused"] += 1
            raise TooManyRequests(
                f"{self.in_use} of {most} connections are in use, and the others are for requests that don't wait",
                retry_after_seconds=AGAIN_SECONDS,
            )

    def free_capacity(self) -> bool:
        """Close a waiting connection if there are too many. Return False if all of them are in use."""
        if len(self.open) <= self.limits.connections:
            return True
        closable = (one for one in chain(self._strangers, self._known) if one.flushed or not one.known)
        if (one := next(closable, None)) is None:
            self.counts["refused"] += 1
            return False
        self.counts["closed_for_others"] += 1
        self.forget(one)
        one.close()
        return True

    def wait(self, connection: Connection, seconds: float) -> None:
        """Record that a connection is waiting, and closed after so many seconds."""
        self._strangers.pop(connection, None)  # it is at the end from now on
        self._known.pop(connection, None)
        connection.until = time.monotonic() + seconds
        (self._known if connection.known else self._strangers)[connection] = None

    def forget(self, connection: Connection) -> None:
        """Record that a connection is no longer waiting."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    async def sweep(self) -> None:
        """Close connections after their deadline, and log if there were too many (called once a second)."""
        now = time.monotonic()
        for one in [one for one in chain(self._strangers, self._known) if one.until <= now]:
            self.forget(one)
            one.expire()
        refused, waits = (self.counts[name] - self._logged[name] for name in ("refused", "waits_refused"))
        if (refused or waits) and now - self._logged_at >= LOG_SECONDS:
            self._logged_at, self._logged = now, Counter(self.counts)
            log.error(
                "%d connections are open, and there may be %d: %d new ones were refused, and %d requests that would "
                "have waited; where these are workers: %s",
                len(self),
                self.limits.connections,
                refused,
                waits,
                self._advice,
            )


def backlog() -> int:
    """Return the listen backlog."""
    return min(LONGEST_BACKLOG, raise_descriptor_limit() // 8)


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
