"""The folder of a run: which one it is, who may use it, and that a start which fails leaves none behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from palestra.config import JobConfig
from palestra.errors import ConfigError, RunInUse

LOCK = ".lock"
ATTEMPTS = 100  # to lock a folder that other starts remove when they fail
MADE_BY_A_START = ("secret", "api_key", "run.db", "run.db-wal", "run.db-shm")


def resolve_run_dir(config: JobConfig, resume: bool, say: Callable[[str], None] = lambda text: None) -> JobConfig:
    """Fix the run's folder: the one configured, or a new `runs/<name>`, `runs/<name>-2`, …

    Args:
        config: the job.
        resume: whether to go on with a run, the newest of its name where no folder is configured.
        say: is told, in a sentence for people, where another folder than `runs/<name>` is taken.

    Raises:
        ConfigError: the folder has a run already and `resume` is False, or has none and it is True.
    """
    if config.run_dir is None:
        number, folder, newest = 1, config.folder, None
        while (folder / "run.db").exists():
            newest, number = folder, number + 1
            folder = config.folder.with_name(f"{config.name}-{number}")
        if newest is not None and not resume:
            say(f"{newest} has a run already; this is a new one, in {folder} (--resume goes on with the other)")
        config = config.model_copy(update={"run_dir": newest if resume and newest else folder})
    known = (config.folder / "run.db").exists()
    if known and not resume:
        raise ConfigError(
            f"{config.folder} has a run already; add --resume to go on with it, or choose another run_dir "
            "(--set run_dir=…)"
        )
    if resume and not known:
        raise ConfigError(f"{config.folder} has no run to go on with; leave --resume out to start one")
    return config


class Start:
    """A run that is being started."""

    def __init__(self, folder: Path) -> None:
        """Look at the folder before anything is made in it."""
        self._folder = folder
        missing = (parent for parent in (folder, *folder.parents) if not parent.exists())
        self._new_folders = list(missing)  # the deepest first
        self._made: tuple[str, ...] = () if (folder / LOCK).exists() else (LOCK,)
        self._is_new = False
        self.succeeded = False

    def locked(self) -> None:
        """Look at the files: no other process makes a run here from now on."""
        self._is_new = not (self._folder / "run.db").exists()
        # The lock comes last: who gets another one while a run is being removed would begin with what is left of it.
        self._made = (*(name for name in MADE_BY_A_START if not (self._folder / name).exists()), *self._made)

    def undo(self) -> None:
        """Remove what the start has made, if there was no run before and it did not succeed."""
        if self.succeeded or not self._is_new:
            return
        for name in self._made:
            (self._folder / name).unlink(missing_ok=True)
        for folder in self._new_folders:
            try:
                folder.rmdir()
            except OSError:  # another file is in it
                return


@contextlib.contextmanager
def starting_in(folder: Path) -> Iterator[Start]:
    """Hold the folder for this process alone; unless `succeeded` is set, leave it as it was.

    Raises:
        RunInUse: another process runs the job in it.
        ConfigError: it can't be made or written.
    """
    start = Start(folder)
    lock = _locked(folder)
    try:
        start.locked()
        yield start
    finally:
        start.undo()
        lock.close()


def _locked(folder: Path) -> IO[str]:
    """Return the lock file of a run, locked.

    Raises:
        RunInUse: another process has locked it.
        ConfigError: it can't be made or locked.
    """
    for _ in range(ATTEMPTS):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a run has its users' prompts
            lock: IO[str] = (folder / LOCK).open("w")
        except FileNotFoundError:  # a start that failed has just removed the folder, or the working folder is gone
            continue
        except OSError as error:
            raise ConfigError(f"{folder} can't be used as a run's folder: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise RunInUse(f"another process is running the job in {folder}") from error
        except OSError as error:
            lock.close()
            raise ConfigError(f"{folder} can't be used as a run's folder: {error.strerror}") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat()):
                return lock
        lock.close()  # a start that failed has removed this file; there may be another one by now
    raise ConfigError(
        f"{folder} can't be used as a run's folder: it, or the folder that it is in, is deleted each time"
    )
