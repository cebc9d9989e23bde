"""Temporary folders of a process: removed with it, or by the next process if it was killed."""

from __future__ import annotations

import asyncio
import atexit
import logging
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path

from palestra.owned_folder import OwnedFolder
from palestra.process.keeper import remove_tree
from palestra.threads import in_thread

log = logging.getLogger("palestra.harness")
PREFIX = "palestra-harness-"
_making = threading.Lock()  # or the first episodes of a worker would make a folder each


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
    with _making:
        if not process_folder(top).exists():  # a program has emptied the folder of temporary files
            process_folder.cache_clear()
        return tempfile.mkdtemp(prefix=prefix, dir=process_folder(top))


@cache
def process_folder(top: Path) -> Path:
    """Make the folder of this process below `top`, and remove those of processes that have been killed."""
    owned = OwnedFolder(PREFIX, top)
    atexit.register(owned.remove)
    return owned.path
