"""Write files of a run whole or not at all, and report an error of the disk in one line with the path and the cause.

Folders that are needed for a while are removed, also if a signal ends the process.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from palestra.errors import StoreError

GO_ON = "go on with --resume (in a script resume=True)"  # advice of errors after which a run can be resumed
RUN_LOCK = ".lock"  # the file in its folder that the process of a run keeps locked
T = TypeVar("T")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that says in one line what to do.

    The OSError stays its `__cause__`, by which a service decides whether the disk or the job is at fault.

    Args:
        path: the file or folder that the block writes, for the message.

    Raises:
        StoreError: the block raised an OSError.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(
            f"{path} could not be written, because its folder was deleted, moved or replaced; put it back from a copy "
            f"and {GO_ON}, or start a new run"
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path} could not be written: {error.strerror or error}; what was acknowledged before is kept, so mend "
            f"that and {GO_ON}"
        ) from error


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file so that after a crash it has either its old content or all of the new.

    Args:
        path: the file; its folder has to exist.
        content: all bytes of the file.
        mode: permissions of a new file, before the umask.

    Raises:
        StoreError: the file could not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                # Without it a crash after the rename could leave an empty file under the final name.
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def in_new_folder(parent: Path, prefix: str, work: Callable[[Path], T]) -> T:
    """Return what `work` returns for a new folder, which is removed afterwards, also if a signal's handler raises."""
    folder = parent / f"{prefix}{secrets.token_hex(8)}"
    # A signal's handler may raise between any two lines. `TemporaryDirectory` forgets its folder where that happens
    # before its `with` is entered; here the name is known, and the `try` entered, before there is a folder.
    try:
        folder.mkdir(mode=0o700)
        return work(folder)
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:  # once more, in case a signal came during the removal
            shutil.rmtree(folder, ignore_errors=True)


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds the lock of a file. On another system than Linux: False."""
    # Read from the kernel's list: to try the lock would make the start of a job fail that tries it in this moment.
    try:
        inode = path.stat().st_ino
        held = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    # A line is `1: FLOCK ADVISORY WRITE PID DEVICE:INODE 0 EOF`. The device is not compared, because a container's file
    # system has another one there.
    return any(" FLOCK " in line and f":{inode} " in line for line in held)
