"""Deletes what sessions have said, from the files of a run themselves, and names the versions that learned from it."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
from pydantic import BaseModel, Field

from palestra.database.sqlite import pieces
from palestra.errors import Conflict, NotFound, StoreError
from palestra.pictures.blobs import FOLDER, Blobs
from palestra_live.store import FILE

BUSY_SECONDS = 30.0  # that a running job may hold the files
ERASED = "forgotten"


class Forgotten(BaseModel):
    """What was deleted, and which versions were trained on it."""

    sessions: int = Field(description="Sessions whose content was deleted.")
    versions: list[str] = Field(
        description="Versions whose training step had one of these sessions, the oldest first; later versions were "
        "made from them."
    )


def subject_digest(subject: str) -> str:
    """Return what stays of a subject's name after a deletion."""
    return hashlib.sha256(subject.encode()).hexdigest()


def sessions_of(folder: Path, subject: str) -> list[str]:
    """Return the sessions of a subject."""
    with _opened(folder / FILE) as live:
        return [name for (name,) in live.execute("SELECT session_id FROM sessions WHERE subject = ?", (subject,))]


def sessions_before(folder: Path, moment: float) -> list[str]:
    """Return the sessions with content that ended before a moment, in Unix seconds."""
    with _opened(folder / FILE) as live:
        wanted = "SELECT session_id FROM sessions WHERE ended_at < ? AND episode_id IS NOT NULL AND state = 'done'"
        return [name for (name,) in live.execute(wanted, (moment,))]


def trained_versions(folder: Path, subject: str) -> list[str]:
    """Return the versions that were trained on sessions of a subject, forgotten ones included, the oldest first."""
    found = {name for name in _trained(folder, sessions_of(folder, subject))}
    with _opened(folder / FILE) as live:
        kept = live.execute("SELECT version FROM forgotten WHERE subject_digest = ?", (subject_digest(subject),))
        found |= {version for (version,) in kept}
    return sorted(found, key=_step)


def forget(folder: Path, names: Sequence[str], subject: str | None = None) -> Forgotten:
    """Delete the content of sessions, and overwrite where it was. Other processes may use the files.

    Args:
        folder: of the run.
        names: the sessions; their rows in the list of sessions are deleted only with a `subject`.
        subject: whose sessions they are; the versions are kept under the digest of its name. None: they are too old.

    Raises:
        Conflict: another process reads the files for too long.
    """
    versions = _trained(folder, names)
    if subject is not None:
        with _opened(folder / FILE) as live, live:
            rows = [(subject_digest(subject), version, time.time()) for version in versions]
            live.executemany("INSERT OR IGNORE INTO forgotten VALUES (?, ?, ?)", rows)
    _clear_run(folder, names)
    with _opened(folder / FILE) as live, live:
        for piece in pieces(names):
            marks = ",".join("?" * len(piece))
            live.execute(f"DELETE FROM feedback WHERE session_id IN ({marks})", piece)
            if subject is None:
                live.execute(f"UPDATE sessions SET episode_id = NULL WHERE session_id IN ({marks})", piece)
            else:
                live.execute(f"DELETE FROM sessions WHERE session_id IN ({marks})", piece)
        if subject is not None:
            live.execute("DELETE FROM feedback WHERE subject = ?", (subject,))
    for file in (FILE, "run.db"):
        _shrink(folder / file)
    found = versions if subject is None else trained_versions(folder, subject)
    return Forgotten(sessions=len(names), versions=found)


def _clear_run(folder: Path, names: Sequence[str]) -> None:
    """Delete the calls of sessions from the run's store; their episodes stay as empty ones, because manifests name
    them.
    """
    with _opened(folder / "run.db") as run, run:
        pictures: set[str] = set()
        for piece in pieces(names):
            marks = ",".join("?" * len(piece))
            mine = f"SELECT episode_id FROM episodes WHERE task_id IN ({marks})"
            for (media,) in run.execute(
                f"SELECT media FROM chats WHERE media IS NOT NULL AND episode_id IN ({mine})", piece
            ):
                pictures |= {digest for *_, digest in orjson.loads(media)}
            for table in ("chats", "trained_tokens"):
                run.execute(f"DELETE FROM {table} WHERE episode_id IN ({mine})", piece)
            run.execute(f"DELETE FROM verdicts WHERE EXISTS ({mine} AND instr(members, episode_id))", piece)
            run.execute(f"UPDATE groups SET task_id = ? WHERE task_id IN ({marks})", (ERASED, *piece))
            run.execute(
                "UPDATE episodes SET task_id = ?, task_data = '{\"baseline\":0.0}', metadata = '{}', reason = NULL, "
                "facts = NULL, named_rewards = NULL, claim_request_id = NULL, worker_id = NULL "
                f"WHERE task_id IN ({marks})",
                (ERASED, *piece),
            )
            for name in piece:
                run.execute(
                    "DELETE FROM events WHERE kind = 'session_stale' AND json_extract(data, '$.session') = ?", (name,)
                )
        kept = run.execute("SELECT media FROM chats WHERE media IS NOT NULL")
        pictures -= {digest for (media,) in kept for *_, digest in orjson.loads(media)}
    for digest in pictures:
        Blobs(folder / FOLDER).path(digest).unlink(missing_ok=True)


def _trained(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the versions that were trained on sessions, the oldest first."""
    found: set[str] = set()
    with _opened(folder / "run.db") as run:
        mine: set[str] = set()
        for piece in pieces(names):
            marks = ",".join("?" * len(piece))
            rows = run.execute(f"SELECT episode_id FROM episodes WHERE kind = 'train' AND task_id IN ({marks})", piece)
            mine |= {name for (name,) in rows}
        if mine:
            for step, episodes, versions in run.execute("SELECT step, episode_ids, versions FROM manifests"):
                if mine & set(orjson.loads(episodes)):
                    found |= {f"{policy}@step-{step}" for policy in orjson.loads(versions)}
    return sorted(found, key=_step)


def _step(version: str) -> int:
    return int(version.rpartition("-")[2])


def _shrink(path: Path) -> None:
    """Write a database anew without its free pages, and empty its write-ahead log."""
    with _opened(path) as connection:
        connection.execute("VACUUM")
        until = time.monotonic() + BUSY_SECONDS
        while True:
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                return
            if time.monotonic() > until:
                raise Conflict(f"another process reads {path}, so its log can't be emptied; end it and forget again")
            time.sleep(0.2)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file of a run, in which what is deleted is overwritten."""
    if not path.is_file():
        raise NotFound(f"{path} is not there; name the folder of a live run")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_SECONDS)
        try:
            connection.execute("PRAGMA secure_delete=ON")
            yield connection
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} can't be used: {error}") from error
