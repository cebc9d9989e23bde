"""Writes files atomically, and reports a disk error in one line with path and cause.

Temporary folders are removed, even if a signal ends the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from palestra.errors import ConfigError, StoreError

GO_ON = "go on with --resume (in a script resume=True)"  # advice of errors after which a run can be resumed
RUN_LOCK = ".lock"  # the file in its folder that the process of a run keeps locked
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
T = TypeVar("T")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that says in one line what to do.

    The OSError stays its `__cause__`, from which a service decides whether the disk or the job is at fault.

    Args:
        path: of the written file or folder, for the message.
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
    """Write a file atomically: after a crash it has either its old or its new content.

    Args:
        mode: permissions of a new file, before the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # of a process that was killed, or a link that somebody has put there
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                # Without it a crash after the rename could leave an empty file under the final name.
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)  # so that the new name stays, too
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush all files and folders in a folder to disk, without the folder's own name."""
    for where, _, files in os.walk(folder):
        for name in (*files, "."):
            sync(Path(where, name))


def make_folders(path: Path) -> None:
    """Create a folder with its parents, and flush the new names to disk."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def rename_whole(source: Path, target: Path) -> None:
    """Rename a folder that is already on disk, replacing a folder of the new name.

    If the system can't exchange two folders, the old one is called `.replaced-NAME` for a moment; after a crash at that
    moment, `put_back` restores it.
    """
    if target.exists() and exchange_folders(source, target):
        old = source
    else:
        shutil.rmtree(old := _replaced(target), ignore_errors=True)
        if target.exists():
            target.rename(old)
        source.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Restore the name of a folder that was being replaced, unless the new one has it; see `rename_whole`."""
    if not folder.exists() and _replaced(folder).exists():
        _replaced(folder).rename(folder)
        sync(folder.parent)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".replaced-{folder.name}")


def exchange_folders(one: Path, other: Path) -> bool:
    """Exchange two folders atomically; False: not supported by the file system, and nothing has changed."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # another system than Linux
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def private_folder(path: Path) -> None:
    """Create a folder accessible only to its owner, or check an existing one."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(path)


def check_folder(path: Path, *, may_be_sticky: bool = False) -> None:
    """Raise ConfigError for a folder in which another user could have put files, such as a secret or a link.

    Args:
        path: a link is followed if it is this user's or root's.
        may_be_sticky: whether to accept a folder like `/tmp`, where everyone may create files but not replace those of
            others.
    """
    for status in (path.lstat(), path.stat()):
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{path} belongs to another user (uid {status.st_uid}); take a folder of your own")
    if status.st_mode & 0o022 and not (may_be_sticky and status.st_mode & stat.S_ISVTX):
        raise ConfigError(
            f"other users can write to the folder {path}; look whether its files are your own, and run "
            f"chmod go-w {path}, or take another folder"
        )


def open_own(path: Path, flags: int, *, follow: bool = False) -> int:
    """Open a file and return its descriptor; refuse one that another user could have created or changed.

    Do not pass O_TRUNC: the file is checked after it is open.

    Args:
        follow: whether to follow a link, for a file named by the operator.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)  # a pipe without a reader does not block
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, and links are not followed here; remove it") from error
        raise
    status = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "is no regular file"
    elif status.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to another user (uid {status.st_uid})"
    elif status.st_mode & 0o022:
        problem = "can be written by other users"
    elif status.st_nlink > 1 and not follow:
        problem = "has a second name (a hard link)"
    if problem:
        os.close(descriptor)
        raise ConfigError(f"{path} {problem}; remove it, or take another folder")
    return descriptor


def read_own(path: Path, *, follow: bool = False) -> bytes:
    """Return the content of a file that no other user could have created or changed; see `open_own`."""
    with os.fdopen(open_own(path, os.O_RDONLY, follow=follow), "rb") as file:
        return file.read()


def in_new_folder(parent: Path, prefix: str, work: Callable[[Path], T]) -> T:
    """Return the result of `work` for a temporary folder, removed afterwards, even if a signal's handler raises."""
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
    """Return whether a process of this machine holds the lock of a file; False on systems other than Linux."""
    # Read from the kernel's list: to try the lock would make the start of a job fail that tries it in this moment.
    try:
        inode = path.stat().st_ino
        held = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    # A line is `1: FLOCK ADVISORY WRITE PID DEVICE:INODE 0 EOF`. The device is not compared, because a container's file
    # system has another one there.
    return any(" FLOCK " in line and f":{inode} " in line for line in held)
