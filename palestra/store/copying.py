"""Copies of a run's records up to a moment, unaffected by the continuing run."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import orjson
import sqlalchemy as sa

from palestra.disk import sync, sync_tree, writing
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.store.browsing import browse
from palestra.store.run_store import store_error
from palestra.store.tables import episodes
from palestra.types.states import EpisodeState

STORE = "run.db"  # in the folder of a run


def completed_until(run_dir: Path, moment: float) -> int:
    """Return the number of training episodes completed until a moment; 0 without a run. `moment`: Unix seconds."""
    if not (run_dir / STORE).is_file():
        return 0
    ended = sa.select(sa.func.count()).where(
        episodes.c.kind == "train", episodes.c.state == EpisodeState.COMPLETED, episodes.c.ended_at <= moment
    )
    with browse(run_dir / STORE) as connection:
        return int(connection.execute(ended).scalar_one())


def copy_completed(run_dir: Path, folder: Path, moment: float) -> None:
    """Write a store with the training episodes completed until a moment, atomically. `folder`: for the store; its
    content is replaced. `moment`: Unix seconds.
    """
    temporary = folder.with_name(f".{folder.name}")
    with writing(folder):
        for left in (temporary, folder):  # of a copy that was broken off
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        source = sqlite3.connect((run_dir / STORE).absolute().as_uri() + "?mode=ro", uri=True, timeout=10)
        copy = sqlite3.connect(temporary / STORE)
        try:
            source.backup(copy)  # one state of the store, although its job may write meanwhile
            copy.execute("PRAGMA journal_mode=DELETE")  # so that the copy is one file
            copy.execute(
                "DELETE FROM episodes WHERE NOT (kind = 'train' AND state = ? AND ended_at <= ?)",
                (EpisodeState.COMPLETED.value, moment),
            )
            copy.execute("DELETE FROM chats WHERE episode_id NOT IN (SELECT episode_id FROM episodes)")
            copy.commit()
            copy.execute("VACUUM")
            _copy_pictures(copy, Blobs(run_dir / FOLDER), Blobs(temporary / FOLDER))
        finally:
            source.close()
            copy.close()
    except sqlite3.Error as error:
        raise store_error(run_dir / STORE, error) from error
    with writing(folder):
        sync_tree(temporary)
        temporary.rename(folder)
        sync(folder.parent)


def _copy_pictures(copy: sqlite3.Connection, source: Blobs, target: Blobs) -> None:
    """Copy the pictures that the calls of a copied store name."""
    for (media,) in copy.execute("SELECT DISTINCT media FROM chats WHERE media IS NOT NULL"):
        for *_, digest in orjson.loads(media):
            if digest not in target:
                target.put(source.get(digest))
