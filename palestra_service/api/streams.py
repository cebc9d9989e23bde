"""Resumable streams of a run's log, state changes and events."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import orjson

from palestra.errors import InvalidRequest, StoreError
from palestra.http.sse import News, encode_event, follow
from palestra.store.browsing import browse
from palestra.store.run_log import read_events
from palestra.threads import in_thread
from palestra.types.records import RunEvent
from palestra_control.jobs import JobRecord
from palestra_control.wire import JobChange
from palestra_service.accounts.identity import Identity
from palestra_service.api.access import ControlPlane

CHUNK_BYTES = 2**16
MOST_EVENTS = 500
READ_SECONDS = 10.0  # that reading the events of a run may take
LARGEST = 2**53  # the largest number of an event that is accepted; SQLite could not compare with a huge one


class StreamPlace(NamedTuple):
    """A client's position in an event stream.

    Attributes:
        event: last read event of the run.
    """

    change: int = 0
    event: int = 0

    def __str__(self) -> str:
        return f"{self.change}.{self.event}"

    @classmethod
    def of(cls, text: str | None) -> Self:
        """Parse the header `Last-Event-ID`; None: the start."""
        if text is None:
            return cls()
        change, _, event = text.partition(".")
        if not (text.isascii() and change.isdigit() and event.isdigit() and len(text) < 40):
            raise InvalidRequest(f"Last-Event-ID is {text!r}; send one that this stream had", "last-event-id")
        return cls(min(int(change), LARGEST), min(int(event), LARGEST))

    def after(self, one: JobChange | RunEvent) -> Self:
        """Return the position after a change or an event."""
        if isinstance(one, RunEvent):
            return self._replace(event=one.event_id)
        return self._replace(change=one.number)


def events(
    plane: ControlPlane, by: Identity, job_id: str, run: Path, place: StreamPlace, wait: bool
) -> AsyncIterator[bytes]:
    """Yield changes and reports of a job as server-sent events, as long as the reader `by` may see it."""

    async def look() -> News | None:
        nonlocal place
        job = await _readable(plane, by, job_id)  # read before the events, so that those of its end are not missed
        if job is None:
            return None
        changes = await plane.store.changes(by.tenant, job_id, place.change)
        last = place.event
        # A thread of its own: reading a damaged run may take long.
        reported = await in_thread(lambda: _events_after(run, last))
        chunks = []
        happened: Iterator[JobChange | RunEvent] = heapq.merge(changes, reported, key=lambda one: one.at)
        for one in happened:
            place = place.after(one)
            chunks.append(_encoded(place, one))
        return News(chunks, job.is_over)

    return follow(look, wait)


def number_of(text: str | None) -> int | None:
    """Return the number of a change in the header `Last-Event-ID`, or None."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidRequest(f"Last-Event-ID is {text!r}; send one that this stream had", "last-event-id")
    return min(int(text), LARGEST)


def tenant_events(plane: ControlPlane, by: Identity, after: int | None, wait: bool) -> AsyncIterator[bytes]:
    """Yield the state changes of all jobs of a tenant, as server-sent events.

    Args:
        by: the reader; the stream ends when the reader's key is no longer valid.
        after: last read change; None: begin at the newest one, and report it.
    """
    changed, seen = plane.store.changed, -1  # seen: number of notifications before the last complete look

    async def look() -> News | None:
        nonlocal after, seen
        now = await plane.identities.renewed(by)
        if now is None:
            return None
        if after is None:
            after = await plane.store.newest_change(by.tenant)
            return News([encode_event(orjson.dumps({"number": after}), "begin", str(after))], False)
        if (count := changed.count) == seen:  # many pages look, and jobs seldom change
            return News([], False)
        found = await plane.store.tenant_changes(by.tenant, after, MOST_EVENTS)
        chunks = []
        for change in found:
            after = change.number
            chunks.append(encode_event(change.model_dump_json().encode(), "state", str(after)))
        if len(found) < MOST_EVENTS:
            seen = count
        return News(chunks, False)

    return follow(look, wait, lambda seconds: changed.wait(seconds, seen))


def log(plane: ControlPlane, by: Identity, job_id: str, path: Path, offset: int, wait: bool) -> AsyncIterator[bytes]:
    """Yield a job's log from a byte on."""

    async def look() -> News | None:
        nonlocal offset
        job = await _readable(plane, by, job_id)
        if job is None:
            return None
        chunk = await asyncio.to_thread(_read, path, offset)
        offset += len(chunk)
        return News([chunk] if chunk else [], job.is_over)

    return follow(look, wait, keepalive=False)


async def _readable(plane: ControlPlane, by: Identity, job_id: str) -> JobRecord | None:
    """Return the job; None: the reader has lost access since the stream began."""
    if await plane.identities.renewed(by) is None:
        return None
    job = await plane.job(by, job_id)
    plane.scheduler.seen(job_id)
    return job


def _encoded(place: StreamPlace, one: JobChange | RunEvent) -> bytes:
    if isinstance(one, RunEvent):
        return encode_event(orjson.dumps({"at": one.at, **one.data}), one.kind, str(place))
    change = {"at": one.at, "state": one.following.value, "reason": one.reason}
    return encode_event(orjson.dumps(change), "state", str(place))


def _events_after(run: Path, last: int) -> list[RunEvent]:
    store = run / "run.db"
    if not store.exists():
        return []
    try:
        with browse(store, READ_SECONDS) as connection:
            return read_events(connection, last, MOST_EVENTS)
    except StoreError:  # the store is just being created, or damaged
        return []


def size_of(path: Path) -> int:
    """Return the present bytes of a log; 0 without a log."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)
    except FileNotFoundError:
        return b""
