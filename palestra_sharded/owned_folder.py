"""A folder in shared memory that is removed even if its owner is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from palestra.models.weights import weight_folder


class OwnedFolder:
    """A new folder, private to this user, that is removed after the process that made it, however that process ends.

    The kernel does not free shared memory of killed processes. So the owner locks its folder, and the next process to
    make one removes folders without a lock.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Create a folder, in shared memory unless `parent` is given, and remove those whose owners have ended."""
        parent = parent or weight_folder()
        for left in parent.glob(f"{prefix}*"):
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
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """Return an open folder that this process has locked; programs that it starts do not inherit the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
