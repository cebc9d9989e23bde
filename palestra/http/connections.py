"""The connections of a server: how many there may be, and which of them are closed first to make room.

Without a limit, clients that connect and send nothing use up the descriptors of the process, and the job can open no
file any more. The limit counts all connections and not those of one address, because behind a proxy all clients have
the same address.
"""

from __future__ import annotations

import logging
import os
import resource
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from palestra.types.clock import Clock, SystemClock

log = logging.getLogger("palestra.http")
MOST_CONNECTIONS = 8192  # an idle connection takes about 10 KiB
FEWEST_CONNECTIONS = 16
RESERVED_DESCRIPTORS = 64  # kept for the files that a running job opens: metrics, checkpoints, the store's
MOST_DESCRIPTORS = 1 << 20  # used if there is no hard limit
LOG_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """The limits of one connection: how much it may send, and how long it may take.

    Attributes:
        connections: how many may be open in all.
        header_bytes: length of a request's line and headers together.
        header_fields: how many headers a request may have.
        header_seconds: from the first byte of a request, or from the connection, to the end of its headers.
        idle_seconds: between two requests.
        stalled_seconds: while answers wait and the client does not read them.
        pipelined: requests that may wait behind the one that is being answered.
    """

    connections: int = MOST_CONNECTIONS
    header_bytes: int = 16_384
    header_fields: int = 200
    header_seconds: float = 20.0
    idle_seconds: float = 75.0
    stalled_seconds: float = 60.0
    pipelined: int = 16


class Connection(Protocol):
    """A connection as `Connections` sees it: something that can be closed."""

    @property
    def known(self) -> bool:
        """Return whether one of its requests had a good key."""
        ...

    @property
    def flushed(self) -> bool:
        """Return whether the client has read everything that was sent to it."""
        ...

    def close_idle(self) -> None:
        """Close the connection, on which no request is being answered."""
        ...

    def expire(self) -> None:
        """Close the connection; a request that has arrived in part is answered with 408."""
        ...


class Connections:
    """Keeps track of all connections of a server, and makes room for new ones.

    A connection is *waiting* if no request on it is being answered: it is idle, or has sent a part of a request's
    headers. If there are too many connections, waiting ones are closed: first those on which no good key has come, the
    one that has waited longest before the others. A connection on which a request is being answered is not closed,
    unless it is *stalled*: its client does not read the answers, so that they fill the buffers. A stalled connection
    without a good key is closed to make room, and any other one after a minute.

    Attributes:
        limits: the present limits.
        counts: how often connections were accepted, refused and closed, by reason, for `/metrics`.
    """

    def __init__(self, limits: ConnectionLimits | None = None, clock: Clock | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self.counts: Counter[str] = Counter()
        self._clock = clock or SystemClock()
        self._open: set[Connection] = set()
        # Waiting connections without and with a good key, longest waiting first.
        self._strangers: OrderedDict[Connection, None] = OrderedDict()
        self._known: OrderedDict[Connection, None] = OrderedDict()
        # Since when (monotonic seconds) headers or the rest of a body are due, nothing was sent, or answers wait.
        self._due: OrderedDict[Connection, float] = OrderedDict()
        self._idle: OrderedDict[Connection, float] = OrderedDict()
        self._stalled: OrderedDict[Connection, float] = OrderedDict()
        self._logged_at = -LOG_SECONDS
        self._logged: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return how many connections are open."""
        return len(self._open)

    def fit_descriptors(self) -> None:
        """Raise the process's limit of descriptors as far as allowed, and limit the connections accordingly."""
        soft = raise_descriptor_limit()
        in_use = len(os.listdir("/proc/self/fd"))
        room = max(soft - in_use - RESERVED_DESCRIPTORS, FEWEST_CONNECTIONS)
        if room < self.limits.connections:
            self.limits = replace(self.limits, connections=room)

    def make_room(self) -> bool:
        """Close a waiting connection if the limit is reached. Return False if all connections are in use."""
        if len(self._open) < self.limits.connections:
            return True
        for candidates in (
            (connection for connection in self._strangers if connection.flushed),
            (connection for connection in chain(self._stalled, self._strangers) if not connection.known),
            (connection for connection in self._known if connection.flushed),
        ):
            if (connection := next(candidates, None)) is not None:
                self.counts["closed_for_others"] += 1
                self.closed(connection)
                connection.close_idle()
                return True
        self.counts["refused"] += 1
        return False

    def opened(self, connection: Connection) -> None:
        """Record that a client has connected; the headers of its first request are due."""
        self.counts["accepted"] += 1
        self._open.add(connection)
        self._strangers[connection] = None
        self._due[connection] = self._clock.monotonic()

    def began(self, connection: Connection) -> None:
        """Record that the first byte of a request has arrived on an idle connection."""
        if self._idle.pop(connection, None) is not None:
            self._due[connection] = self._clock.monotonic()

    def answering(self, connection: Connection) -> None:
        """Record that the headers of a request are complete, so that the connection is not waiting any more."""
        for waiting in (self._strangers, self._known, self._due, self._idle):
            waiting.pop(connection, None)

    def answered(self, connection: Connection, known: bool, complete: bool) -> None:
        """Record that a response was sent and that no other request has arrived.

        Args:
            known: whether one of its requests had a good key.
            complete: whether the request was received to its end; otherwise the rest of its body is due.
        """
        if connection not in self._open:
            return
        (self._known if known else self._strangers)[connection] = None
        (self._idle if complete else self._due)[connection] = self._clock.monotonic()

    def received(self, connection: Connection) -> None:
        """The rest of a request has come that was answered before: the connection is idle from now on."""
        if self._due.pop(connection, None) is not None:
            self._idle[connection] = self._clock.monotonic()

    def stalled(self, connection: Connection) -> None:
        """Record that answers wait in the connection's buffer, because its client does not read them."""
        if connection in self._open:
            self._stalled[connection] = self._clock.monotonic()

    def resumed(self, connection: Connection) -> None:
        """Record that the client has read what was waiting, or most of it."""
        self._stalled.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """Record that the connection is closed, and forget it."""
        self._open.discard(connection)
        self._stalled.pop(connection, None)
        self.answering(connection)

    def sweep(self) -> None:
        """Close connections that have taken too long, and log a warning if there were too many.

        Call it about once a second.
        """
        now = self._clock.monotonic()
        for since, seconds, name in (
            (self._due, self.limits.header_seconds, "headers_late"),
            (self._idle, self.limits.idle_seconds, "idle_too_long"),
            (self._stalled, self.limits.stalled_seconds, "answer_not_taken"),
        ):
            while since and next(iter(since.values())) <= now - seconds:
                connection = next(iter(since))
                self.counts[name] += 1
                self.closed(connection)
                connection.expire()
        self._report(now)

    def _report(self, now: float) -> None:
        """Log how many connections were closed or refused for lack of room, at most once in `LOG_SECONDS`."""
        news = {name: self.counts[name] - self._logged[name] for name in ("closed_for_others", "refused")}
        if any(news.values()) and now - self._logged_at >= LOG_SECONDS:
            self._logged_at, self._logged = now, Counter(self.counts)
            log.log(
                logging.ERROR if news["refused"] else logging.WARNING,
                "%d connections are open, and there may be %d: %d idle ones were closed and %d new ones refused; where "
                "these are workers, raise the limit of open files (ulimit -n)",
                len(self),
                self.limits.connections,
                news["closed_for_others"],
                news["refused"],
            )


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
