"""A run as the page sees it: its folder, and what only the process that runs it knows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from sqlalchemy import Connection

from palestra.config import SAVED_CONFIG, JobConfig, load_saved_config
from palestra.dashboard.answers import LiveState
from palestra.dashboard.token_text import TokenText, token_text
from palestra.disk import RUN_LOCK, is_locked
from palestra.errors import ConfigError, NotFound, StoreError
from palestra.store.browsing import browse, newest_event_number
from palestra.store.run_store import UNREADABLE

# Errors of reading a damaged record; `run.open` makes a StoreError of those that SQLite finds.
DAMAGED = (*UNREADABLE, StoreError, LookupError, TypeError, AttributeError, AssertionError, OverflowError)
HELD_SECONDS = 5.0  # between two questions whether a process runs the job: all locks of the machine are read
QUERY_SECONDS = 10.0  # that the queries of one connection may take: a table may be a view without an end


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that the page shows.

    Attributes:
        name: stands for the run in addresses; unique on a page.
        folder: of the run.
        live: returns what the process that runs it knows; None: another process does, or none.
        given: configuration of a run that is being started; None: it is in the folder.
        texts: returns the function that gives the text of token ids of a policy; None: tokenizers are loaded here.
        title: name for people; None: `name`.
        serve: command that serves what it has trained; None: one that reads its folder.
        used: returns whether a process of any machine runs the job; None: the lock in its folder says so.
    """

    name: str
    folder: Path
    live: Callable[[], LiveState] | None = None
    given: JobConfig | None = None
    texts: Callable[[str], TokenText] | None = None
    title: str | None = None
    serve: str | None = None
    used: Callable[[], bool] | None = None
    _held: dict[str, tuple[float, bool]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @contextlib.contextmanager
    def open(self) -> Iterator[Connection]:
        """Open a connection that only reads.

        Raises:
            StoreError: the store is damaged, or of another version of Palestra.
        """
        path = self.folder / "run.db"
        with browse(path, QUERY_SECONDS) as connection:
            yield connection

    @property
    def config(self) -> JobConfig:
        """Return the configuration of the run.

        Raises:
            ConfigError: there is none, or it can't be read.
        """
        if self.given is not None:
            return self.given
        path = self.folder / SAVED_CONFIG
        try:
            return _config(self.folder, path.stat().st_mtime_ns)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error

    def text_of(self, policy: str) -> TokenText:
        """Return the function that gives the text of token ids of a policy.

        Raises:
            ModelError: its tokenizer is not on this machine.
        """
        return token_text(self.config, policy) if self.texts is None else self.texts(policy)

    @property
    def seen(self) -> tuple[int, ...]:
        """Return numbers that change whenever something is written to the store."""
        found: list[int] = []
        for name in ("run.db", "run.db-wal"):
            with contextlib.suppress(OSError):
                status = os.stat(self.folder / name)
                found += [status.st_mtime_ns, status.st_size]
        return tuple(found)

    @property
    def begun(self) -> tuple[int, ...]:
        """Return numbers that change when another run takes this one's folder, or when this one is resumed."""
        try:
            status = os.stat(self.folder / SAVED_CONFIG)  # which every start writes
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns

    @property
    def store_bytes(self) -> int:
        """Return the bytes of the store and of its log of writes."""
        return sum(self.seen[1::2])

    def newest_event(self) -> int | None:
        """Return the number of the newest event, 0 if there is none; None: `open` says why it can't be read."""
        path = self.folder / "run.db"
        return newest_event_number(path, QUERY_SECONDS) if path.is_file() else None

    def in_use(self) -> bool:
        """Return whether a process runs the job, at most `HELD_SECONDS` ago; without `used`, one of this machine."""
        if self.live is not None:
            return True
        if self.used is not None:
            return self.used()
        if (known := self._held.get("held")) is None or time.monotonic() >= known[0]:
            known = self._held["held"] = time.monotonic() + HELD_SECONDS, is_locked(self.folder / RUN_LOCK)
        return known[1]


@lru_cache(maxsize=64)
def _config(folder: Path, changed_at: int) -> JobConfig:
    return load_saved_config(folder)


def runs_of(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in some folders, each with a name of its own.

    Args:
        folders: of runs; a folder that is named twice is one run.

    Raises:
        NotFound: a folder is not that of a run.
    """
    found: dict[Path, Run] = {}
    names: set[str] = set()
    for folder in (path.absolute() for path in folders):
        if not (folder / "run.db").is_file():
            raise NotFound(f"{folder} is not the folder of a run (it has no run.db)")
        if folder.resolve() in found:
            continue
        base = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in folder.name) or "run"
        name = next(n for n in (base, *(f"{base}-{i}" for i in range(2, len(folders) + 2))) if n not in names)
        names.add(name)
        found[folder.resolve()] = Run(name=name, folder=folder)
    return list(found.values())
