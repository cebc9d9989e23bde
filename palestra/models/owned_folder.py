"""A folder in shared memory that goes with the process that made it, however that process ends.

The kernel frees nothing in shared memory when processes are killed. So a folder is locked by its owner, and the
process that makes the next one removes those without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from palestra.models.weight_file import weight_folder


class OwnedFolder:
    """A new folder, private to this user.

    Attributes:
        path: of the folder.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Remove folders of this prefix whose owners have ended, and make a new one.

        Args:
            parent: where it is made; None: in shared memory.

        Raises:
            OSError: it can't be made.
        """
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
        """Remove the folder and what is in it; does nothing the second time."""
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
