"""Temporary folders of a process: removed with it, or by the next process if it was killed.

A process has one folder, and holds a lock in it while it lives. The kernel frees the lock however a process ends.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path

from palestra.process.keeper import remove_tree
from palestra.threads import in_thread

log = logging.getLogger("palestra.harness")
PREFIX = "palestra-harness-"
_LOCK = "lock"


@asynccontextmanager
async def temporary_folder(prefix: str) -> AsyncIterator[Path]:
    """Make a folder that is removed after the block, in a thread: programs leave many files."""
    made = await in_thread(partial(_new_folder, prefix))
    try:
        yield Path(made)
    finally:
        if not await asyncio.shield(in_thread(partial(remove_tree, made))):  # what was played counts all the same
            log.warning("%s can't be removed as a whole", made)


def _new_folder(prefix: str) -> str:
    top = Path(tempfile.gettempdir())
    if not (process_folder(top) / _LOCK).exists():  # a program has emptied the folder of temporary files
        process_folder.cache_clear()
    return tempfile.mkdtemp(prefix=prefix, dir=process_folder(top))


@cache
def process_folder(top: Path) -> Path:
    """Make the folder of this process below `top`, and remove those of processes that have been killed."""
    remove_leftovers(top)
    made = Path(tempfile.mkdtemp(prefix="palestra-new-", dir=top))  # named in the end, when its lock is held
    lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)  # until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = made.rename(top / made.name.replace("palestra-new-", PREFIX))
    atexit.register(_remove, folder)
    return folder


def remove_leftovers(top: Path) -> None:
    """Remove the folders of processes of this user that have ended."""
    for folder in top.glob(f"{PREFIX}*"):
        with suppress(OSError):  # its process lives (BlockingIOError), or another one has just removed it
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last: what can't be removed now is found again by the next process."""
    with suppress(FileNotFoundError):  # somebody else has removed it
        for path in folder.iterdir():
            if path.name != _LOCK:
                remove_tree(str(path))
        if {path.name for path in folder.iterdir()} <= {_LOCK}:
            remove_tree(str(folder))
