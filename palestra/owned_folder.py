"""A folder that is removed even if its owner is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from palestra.process.keeper import remove_tree

_RANDOM = "[a-z0-9_]" * 8  # what `mkdtemp` adds to a prefix


class OwnedFolder:
    """A new folder, private to this user, that is removed after the process that made it, however that process ends.

    The system keeps the files and the shared memory of a killed process. So the owner locks its folder, and the next
    process that makes one removes those without a lock.
    """

    def __init__(self, prefix: str, parent: Path) -> None:
        """Create a folder in `parent`, and remove those whose owners have ended."""
        for left in parent.glob(f"{prefix}{_RANDOM}"):  # and no folder that people have named so
            _remove_if_left(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # A folder has no lock for a moment, in which another process may remove it.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self._lock = _locked(self.path)
                if self.path.exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder with its content; idempotent."""
        remove_tree(str(self.path))
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """Return an open folder that this process has locked; programs that it starts do not inherit the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_left(folder: Path) -> None:
    """Remove a folder that no process has locked; one of another user stays."""
    with contextlib.suppress(OSError):
        descriptor = _locked(folder)
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                remove_tree(str(folder))
        finally:
            os.close(descriptor)
