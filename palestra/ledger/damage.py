"""What can be wrong with the file of a run store: damaged, full, read-only, or gone while it is used."""

from __future__ import annotations

import os
import sqlite3
import zlib
from pathlib import Path

import sqlalchemy as sa

from palestra.errors import StoreError

DAMAGED_CODES = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT))
# What decoding raises of a record that is not as it was written: of JSON, compressed arrays, text, names of states.
UNREADABLE = (zlib.error, ValueError)
# What else may come of such a record, or of a defect of ours; the file is looked through to tell.
PERHAPS = (KeyError, IndexError, TypeError, AttributeError, AssertionError, sqlite3.IntegrityError)


def store_error(path: Path, error: Exception) -> Exception:
    """Return an error of a run store in words, with the cause; a defect of ours, and a PalestraError, as they are.

    Args:
        path: of the store.
        error: what SQLite, SQLAlchemy, or the decoding of a record raised.
    """
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    if isinstance(cause, PERHAPS):
        if (damage := damage_of(path)) is None:
            return error
        found = damaged(path, damage)
    elif isinstance(cause, sqlite3.DatabaseError) and not _says_damaged(cause):
        found = StoreError(f"the run store {path} can't be used: {cause}; mend that, and go on with --resume")
    elif isinstance(cause, (sqlite3.DatabaseError, *UNREADABLE)):
        found = damaged(path, str(cause))
    else:
        return error
    found.__cause__ = cause
    return found


def _says_damaged(error: sqlite3.DatabaseError) -> bool:
    """Whether it is about what the file holds. Python's own error, about text that is no UTF-8, has no code."""
    code = getattr(error, "sqlite_errorcode", None)
    return "decode" in str(error) if code is None else code & 0xFF in DAMAGED_CODES


def damaged(path: Path, how: str) -> StoreError:
    """Return the error for a store that can't be trusted any more."""
    line = " ".join(how.split())[:200]
    return StoreError(
        f"{path} is not a run store, or is damaged: {line}; go on with a copy of it, or start a new run from the "
        "newest checkpoint (policies.*.model)"
    )


def damage_of(path: Path) -> str | None:
    """Look through the whole file; return what is wrong with it, or None.

    It takes as long as reading the file does, so it is for when something has failed already.
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


class OpenFile:
    """Knows which file was opened, so that it is noticed when another one, or none, has its name.

    A process may write for ever into a file that was deleted: SQLite does not look at its name again. No other file
    can get the inode meanwhile, because it is still open.
    """

    def __init__(self, path: Path) -> None:
        """`path` is open already, and so is its write-ahead log."""
        names = (
            str(path),
            f"{path}-wal",
        )  # text: it is looked at after each commit, and a Path takes three times as long
        self._known = {name: found for name in names if (found := _identity(name)) is not None}

    def problem(self) -> StoreError | None:
        """Return the error if the file is no longer what its path names; None where it is."""
        for name, known in self._known.items():
            if _identity(name) != known:
                return StoreError(
                    f"{name} was deleted, moved or replaced while the job was running, so nothing more is "
                    "acknowledged; put it back from a copy and go on with --resume, or start a new run"
                )
        return None


def _identity(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino
