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
MADE_BY_A_START = (LOCK, "secret", "api_key", "run.db", "run.db-wal", "run.db-shm")


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
        self._folder = folder
        self._is_new = not (folder / "run.db").exists()
        self._there = {name for name in MADE_BY_A_START if (folder / name).exists()}
        missing = (parent for parent in (folder, *folder.parents) if not parent.exists())
        self._new_folders = list(missing)  # the deepest first
        self.succeeded = False

    def undo(self) -> None:
        """Remove what the start has made, if there was no run before and it did not succeed."""
        if self.succeeded or not self._is_new:
            return
        for name in MADE_BY_A_START:
            if name not in self._there:
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
        yield start
    finally:
        start.undo()
        lock.close()


def _locked(folder: Path) -> IO[str]:
    """The lock file of a run, locked."""
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a run has its users' prompts
            lock: IO[str] = (folder / LOCK).open("w")
        except FileNotFoundError:  # a start that failed has just removed the folder
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
