"""Logs, changes of state and events of a run, as they happen; all can be read again from any place."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import orjson

from palestra.errors import Forbidden, InvalidRequest, NotFound, StoreError
from palestra.ledger.browsing import browse
from palestra.ledger.run_log import read_events
from palestra.scheduler.api.access import ControlPlane
from palestra.scheduler.identity import Identity
from palestra.scheduler.permissions import Action
from palestra.schemas.jobs import JobChange
from palestra.schemas.records import Event

POLL_SECONDS = 0.5
KEEPALIVE_SECONDS = 15.0
CHUNK_BYTES = 2**16
MOST_EVENTS = 500
LARGEST = 2**53  # number of an event; more is no integer to SQLite


class Place(NamedTuple):
    """How far somebody has read: changes of the job, and events of its run."""

    change: int = 0
    event: int = 0

    def __str__(self) -> str:
        return f"{self.change}.{self.event}"

    @classmethod
    def of(cls, text: str | None) -> Self:
        """From `Last-Event-ID`.

        Raises:
            InvalidRequest: it is none of ours.
        """
        if text is None:
            return cls()
        change, _, event = text.partition(".")
        if not (text.isascii() and change.isdigit() and event.isdigit() and len(text) < 40):
            raise InvalidRequest(f"Last-Event-ID is {text!r}; send one that this stream had", "last-event-id")
        return cls(min(int(change), LARGEST), min(int(event), LARGEST))


async def events(
    plane: ControlPlane, by: Identity, job_id: str, run: Path, place: Place, follow: bool
) -> AsyncIterator[bytes]:
    """Server-sent events, while the key opens the job."""
    quiet = 0.0
    while await _may_read(plane, by, job_id):
        job = await plane.store.job(by.tenant, job_id)  # looked at first, so that nothing of the end is missed
        plane.scheduler.seen(job_id)
        changes = await plane.store.changes(by.tenant, job_id, place.change)
        reported = await asyncio.to_thread(_events_after, run, place.event)
        happened: Iterator[JobChange | Event] = heapq.merge(changes, reported, key=lambda one: one.at)
        for one in happened:
            if isinstance(one, Event):
                place = place._replace(event=one.event_id)
                yield _event(place, one.kind, {"at": one.at, **one.data})
            else:
                place = place._replace(change=one.number)
                yield _event(place, "state", {"at": one.at, "state": one.following.value, "reason": one.reason})
        if changes or reported:
            quiet = 0.0
            continue
        if not follow or job.is_over:
            return
        await asyncio.sleep(POLL_SECONDS)
        quiet += POLL_SECONDS
        if quiet >= KEEPALIVE_SECONDS:
            quiet = 0.0
            yield b": still here\n\n"


async def log(
    plane: ControlPlane, by: Identity, job_id: str, path: Path, offset: int, follow: bool
) -> AsyncIterator[bytes]:
    """A log from a byte on, while the key opens the job."""
    while await _may_read(plane, by, job_id):
        job = await plane.store.job(by.tenant, job_id)
        plane.scheduler.seen(job_id)
        while chunk := await asyncio.to_thread(_read, path, offset):
            offset += len(chunk)
            yield chunk
            if not await _may_read(plane, by, job_id):
                return
        if not follow or job.is_over:
            return
        await asyncio.sleep(POLL_SECONDS)


async def _may_read(plane: ControlPlane, by: Identity, job_id: str) -> bool:
    """Whether the key still opens the job: it may have been revoked, or its user's role changed, since the start."""
    now = await plane.identities.renewed(by)
    if now is None:
        return False
    try:
        await plane.job(now, job_id, Action.JOB_READ)
    except (Forbidden, NotFound):
        return False
    return True


def _event(place: Place, kind: str, data: object) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (str(place).encode(), kind.encode(), orjson.dumps(data))


def _events_after(run: Path, last: int) -> list[Event]:
    """What the run has reported; nothing while it has no store."""
    store = run / "run.db"
    if not store.exists():
        return []
    try:
        with browse(store) as connection:
            return read_events(connection, last, MOST_EVENTS)
    except StoreError:  # it is being made
        return []


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)
    except FileNotFoundError:
        return b""
