"""The connections of a server: how many there may be, which of them are closed first, and what became of them.

Without a limit, clients that connect and send nothing use up the descriptors of the process, and the job can open no
file any more. The limit counts all connections and not those of an address: behind a proxy all clients have one.
"""

from __future__ import annotations

import logging
import os
import resource
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from palestra.schemas.clock import Clock, SystemClock

log = logging.getLogger("palestra.http")
MOST_CONNECTIONS = 8192  # an idle one takes about 10 KiB
FEWEST_CONNECTIONS = 16
RESERVED_DESCRIPTORS = 64  # for the files that a job opens while it runs: metrics, checkpoints, its curve, the store's
MOST_DESCRIPTORS = 1 << 20  # where the hard limit is none
LOG_SECONDS = 60.0  # no more than one line in this time


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """What one connection may send, and how long it may take."""

    connections: int = MOST_CONNECTIONS
    header_bytes: int = 16_384  # of a request's line and headers together
    header_fields: int = 200
    header_seconds: float = 20.0  # from the first byte of a request, or from the connection, to the end of its headers
    idle_seconds: float = 75.0  # between two requests
    stalled_seconds: float = 60.0  # while answers wait, and the client takes nothing of them
    pipelined: int = 16  # requests that may wait behind the one that is being answered


class Connection(Protocol):
    """What `Connections` needs of a connection."""

    @property
    def known(self) -> bool:
        """Whether a request of it had a good key."""
        ...

    @property
    def flushed(self) -> bool:
        """Whether the client has taken all that was sent to it."""
        ...

    def close_idle(self) -> None:
        """Close it; no request of it is being answered."""
        ...

    def expire(self) -> None:
        """Close it, and answer what it has sent of a request with 408."""
        ...


class Connections:
    """Keeps track of all connections of a server, and makes room for new ones.

    A connection is *waiting* where no request of it is being answered: it is idle, or has sent a part of a request's
    headers. Waiting connections are closed where there are too many, those first over which no good key has come, and
    of these the one that has waited longest. A connection over which a request is being answered is not closed, unless
    it is *stalled*: its answers fill the buffers, because its client does not take them. One without a good key is then
    closed to make room, and any after a minute.
    """

    def __init__(self, limits: ConnectionLimits | None = None, clock: Clock | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self.counts: Counter[str] = Counter()  # what happened to connections, by name, for `/metrics`
        self._clock = clock or SystemClock()
        self._open: set[Connection] = set()
        self._strangers: OrderedDict[Connection, None] = OrderedDict()  # waiting, without a good key so far
        self._known: OrderedDict[Connection, None] = OrderedDict()  # waiting, with one
        self._due: OrderedDict[Connection, float] = OrderedDict()  # since when headers, or the rest of a body, are due
        self._idle: OrderedDict[Connection, float] = OrderedDict()  # since when nothing has been sent
        self._stalled: OrderedDict[Connection, float] = OrderedDict()  # since when the client has taken too little
        self._logged_at = -LOG_SECONDS
        self._logged: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def fit_descriptors(self) -> None:
        """Raise the process's limit of descriptors as far as it may, and keep the connections below it."""
        soft = raise_descriptor_limit()
        in_use = len(os.listdir("/proc/self/fd"))
        room = max(soft - in_use - RESERVED_DESCRIPTORS, FEWEST_CONNECTIONS)
        if room < self.limits.connections:
            self.limits = replace(self.limits, connections=room)

    def make_room(self) -> bool:
        """Close a waiting connection where there are as many as there may be. False: all of them are in use."""
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
        """A client has connected; the headers of its first request are due."""
        self.counts["accepted"] += 1
        self._open.add(connection)
        self._strangers[connection] = None
        self._due[connection] = self._clock.monotonic()

    def began(self, connection: Connection) -> None:
        """The first byte of a request has come over an idle connection."""
        if self._idle.pop(connection, None) is not None:
            self._due[connection] = self._clock.monotonic()

    def answering(self, connection: Connection) -> None:
        """The headers of a request are complete."""
        for waiting in (self._strangers, self._known, self._due, self._idle):
            waiting.pop(connection, None)

    def answered(self, connection: Connection, known: bool, complete: bool) -> None:
        """A response has been sent, and no other request is there.

        Args:
            connection: where.
            known: whether a request of it had a good key.
            complete: whether all of the request has been received; else its rest is due.
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
        """Answers wait in the connection's buffer, and no more is written to it."""
        if connection in self._open:
            self._stalled[connection] = self._clock.monotonic()

    def resumed(self, connection: Connection) -> None:
        """The client has taken what was waiting, or most of it."""
        self._stalled.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """The connection is gone."""
        self._open.discard(connection)
        self._stalled.pop(connection, None)
        self.answering(connection)

    def sweep(self) -> None:
        """Close what has taken too long, and say what happened; to be called about once a second."""
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
    """Raise the soft limit of open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
