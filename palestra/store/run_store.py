"""Opens and bundles a run's database, and detects problems of its file: damaged, full, read-only, or replaced."""

from __future__ import annotations

import sqlite3
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, select

from palestra.config import PicturesConfig, RolloutConfig
from palestra.database import Backend, Database
from palestra.database.sqlite import OpenFile, make_private, open_engine, transaction
from palestra.disk import GO_ON, private_folder, writing
from palestra.errors import StoreError
from palestra.pictures.blobs import FOLDER, KeptPictures
from palestra.pictures.containers import PictureLimits
from palestra.store import tables
from palestra.store.calls import Calls, TrainedTokens
from palestra.store.episodes import Episodes
from palestra.store.groups import Groups, open_groups
from palestra.store.leases import LeaseBook
from palestra.store.run_log import RunLog
from palestra.store.spending import Spending
from palestra.store.tables import chats
from palestra.store.tasks import Tasks
from palestra.store.verdicts import Verdicts
from palestra.threads import in_thread
from palestra.types.clock import Clock, SystemClock

DAMAGED_CODES = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT))
# Errors of decoding a damaged record: its JSON, compressed arrays, text, or names of states.
UNREADABLE = (zlib.error, ValueError)
# Errors that a damaged record may also cause, or a defect of Palestra; checking the whole file tells which it was.
PERHAPS = (KeyError, IndexError, TypeError, AttributeError, AssertionError, sqlite3.IntegrityError)


def store_error(path: Path, error: Exception) -> Exception:
    """Return the caller's error for an error of a run store: StoreError if the file or the disk is the cause.

    Defects of Palestra and PalestraErrors are returned unchanged.
    """
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    if isinstance(cause, PERHAPS):
        if (damage := damage_of(path)) is None:
            return error
        found = damaged(path, damage)
    elif isinstance(cause, sqlite3.DatabaseError) and not _says_damaged(cause):
        found = StoreError(f"the run store {path} can't be used: {cause}; mend that, and {GO_ON}")
    elif isinstance(cause, (sqlite3.DatabaseError, *UNREADABLE)):
        found = damaged(path, str(cause))
    else:
        return error
    found.__cause__ = cause
    return found


def _says_damaged(error: sqlite3.DatabaseError) -> bool:
    """Return whether SQLite complains of the file's content; Python's error for text that is no UTF-8 has no code."""
    code = getattr(error, "sqlite_errorcode", None)
    return "decode" in str(error) if code is None else code & 0xFF in DAMAGED_CODES


def damaged(path: Path, how: str) -> StoreError:
    """Return the error for a store with damaged content."""
    line = " ".join(how.split())[:200]
    return StoreError(
        f"{path} is not a run store, or is damaged: {line}; go on with a copy of it, or start a new run from the "
        "newest checkpoint (policies.*.model)"
    )


def damage_of(path: Path) -> str | None:
    """Check the whole file, and describe its damage, or return None.

    It reads the whole file, so call it only after a failure.
    """
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if found == "ok" else str(found)


@dataclass(frozen=True, kw_only=True)
class RunStore:
    """The store of one run: a bundle of parts, of which each component gets only those that it needs.

    A context manager that closes the store.

    Attributes:
        audits: verdicts of the audit's judge, which are no rewards.
        trained: logprobs of tokens when they were trained, of the newest steps.
        pictures: of the calls, which name them by digest; files next to the database.
    """

    db: Database
    clock: Clock
    leases: LeaseBook
    tasks: Tasks
    episodes: Episodes
    calls: Calls
    groups: Groups
    verdicts: Verdicts
    audits: Verdicts
    trained: TrainedTokens
    log: RunLog
    spending: Spending
    pictures: KeptPictures

    def close(self) -> None:
        """Finish the submitted operations and close the file."""
        self.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run_store(
    path: Path,
    rollout: RolloutConfig,
    clock: Clock | None = None,
    pictures: PicturesConfig | None = None,
    synchronous: str = "FULL",
) -> RunStore:
    """Open or create the store of a run. `synchronous`: SQLite's level; NORMAL loses commits with the power."""
    clock = clock or SystemClock()
    with writing(path):
        private_folder(path.parent)
        make_private(path)
    backend = Backend(
        engine=open_engine(path, synchronous),
        read_engine=open_engine(path, synchronous, read_only=True),
        readers=1,
        explain=partial(store_error, path),
        watch=lambda: OpenFile(path).problem,
        transaction=transaction,
    )
    db = Database(backend, tables.SCHEMA)
    try:
        leases = LeaseBook(clock, rollout.timeout_seconds)
        episodes = Episodes(db, leases, rollout, clock, db.query(open_groups))
    except BaseException:
        db.close()
        raise
    return RunStore(
        db=db,
        clock=clock,
        leases=leases,
        tasks=Tasks(db),
        episodes=episodes,
        calls=Calls(db),
        groups=Groups(db, clock, episodes.available, episodes.open_groups),
        verdicts=Verdicts(db, clock),
        audits=Verdicts(db, clock, audit=True),
        trained=TrainedTokens(db),
        log=RunLog(db, clock),
        spending=Spending(db),
        pictures=_pictures(path.parent / FOLDER, pictures or PicturesConfig(), clock),
    )


def _pictures(folder: Path, config: PicturesConfig, clock: Clock) -> KeptPictures:
    return KeptPictures(folder, PictureLimits(), int(config.store_gib * 2**30), clock.monotonic)


UNUSED_SECONDS = 3600.0  # beyond the longest attempt: workers upload a picture again after half of this time


async def remove_unnamed_pictures(store: RunStore, timeout_seconds: float) -> int:
    """Remove pictures that no recorded call names and that were not used recently, and return how many. Only this
    process may write to the store.

    A call names its pictures when it is recorded, at most one attempt after they were put or renewed. Pictures are kept
    until then, and for `UNUSED_SECONDS` more, so running calls need not be known, and a killed process leaves only
    pictures for the next removal.
    """
    pictures, seconds = store.pictures, timeout_seconds + UNUSED_SECONDS
    unused = await in_thread(lambda: pictures.unused(seconds))
    if not unused:
        return 0
    named = unused & await store.db.read(_named)
    for digest in named:  # so that they are not asked for again at the next look
        pictures.renew(digest)
    return await in_thread(lambda: pictures.remove_unused(unused - named, seconds))


def _named(connection: Connection) -> set[str]:
    """Return the digests of the pictures of all recorded calls."""
    rows = connection.execute(select(chats.c.media).where(chats.c.media.is_not(None)).distinct())
    return {digest for (media,) in rows for _, _, digest in orjson.loads(media)}
