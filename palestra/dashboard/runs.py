"""A run on the page: its folder, and the data of its process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from sqlalchemy import Connection

from palestra.config import SAVED_CONFIG, JobConfig, load_saved_config, past_of
from palestra.dashboard.answers import LiveState
from palestra.dashboard.costs import PhaseTimes
from palestra.disk import RUN_LOCK, is_locked
from palestra.doctor.examination import Examined
from palestra.errors import ConfigError, NotFound, StoreError
from palestra.store.browsing import browse, newest_event_number
from palestra.store.counting import EpisodeCounts
from palestra.store.run_store import UNREADABLE

TokenText = Callable[[int], str]


def token_text(config: JobConfig, policy: str) -> TokenText:
    """Return the detokenizer of a policy or past version, with its model's tokenizer."""
    if not config.engine.has_model:
        from palestra.renderers import ByteTokenizer

        plain = ByteTokenizer()
        return lambda token: plain.decode([token])
    past = past_of(policy)
    return _of_model(config.policies[policy if past is None else past[0]].model)


@lru_cache(maxsize=8)
def _of_model(model: str) -> TokenText:
    from palestra.models.catalog import model_folder

    # Who looks at a run sends no request to anybody, whatever model its folder names.
    if (file := Path(model_folder(model, ask=False)) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        # Neither transformers nor torch, whose import takes seconds; the text of a token is the same.
        plain = Tokenizer.from_file(str(file))
        return lambda token: str(plain.decode([token], skip_special_tokens=False))
    from palestra.models.adapter_files import tokenizer_source
    from palestra.models.causal_lm import load_tokenizer

    tokenizer = load_tokenizer(str(model_folder(tokenizer_source(model), ask=False)))
    return lambda token: str(tokenizer.decode([token]))


# Errors of reading a damaged record; `run.open` makes a StoreError of those that SQLite finds.
DAMAGED = (*UNREADABLE, StoreError, LookupError, TypeError, AttributeError, AssertionError, OverflowError)
HELD_SECONDS = 5.0  # between two questions whether a process runs the job: all locks of the machine are read
QUERY_SECONDS = 10.0  # that the queries of one connection may take: a table may be a view without an end


class RunMemory:
    """What was read of a run and does not change any more.

    Attributes:
        examined: what the doctor's findings need of finished steps; one search at a time uses it.
        times: of finished steps, by phase.
    """

    def __init__(self) -> None:
        self.counts, self.examined = EpisodeCounts(), Examined()
        self.times = PhaseTimes()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on the page.

    Attributes:
        name: in addresses; unique on a page.
        live: returns live state of its process; None: another process runs it, or none.
        given: configuration of a starting run; None: read it from the folder.
        texts: returns the detokenizer of a policy; None: tokenizers are loaded here.
        serve: command that serves its result; None: one that reads its folder.
        used: returns whether a process of any machine runs the job; None: check the folder's lock.
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
    _memory: dict[tuple[int, ...], RunMemory] = field(default_factory=dict, init=False, repr=False, compare=False)

    @contextlib.contextmanager
    def open(self) -> Iterator[Connection]:
        """Open a read-only connection."""
        path = self.folder / "run.db"
        with browse(path, QUERY_SECONDS) as connection:
            yield connection

    @property
    def config(self) -> JobConfig:
        """Return the configuration of the run."""
        if self.given is not None:
            return self.given
        path = self.folder / SAVED_CONFIG
        try:
            return _config(self.folder, path.stat().st_mtime_ns)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error

    def text_of(self, policy: str) -> TokenText:
        """Return the detokenizer of a policy."""
        return token_text(self.config, policy) if self.texts is None else self.texts(policy)

    @property
    def seen(self) -> tuple[int, ...]:
        """Return numbers that change whenever the store is written."""
        found: list[int] = []
        for name in ("run.db", "run.db-wal"):
            with contextlib.suppress(OSError):
                status = os.stat(self.folder / name)
                found += [status.st_mtime_ns, status.st_size]
        return tuple(found)

    @property
    def begun(self) -> tuple[int, ...]:
        """Return numbers that change when this run is resumed, or another one takes its folder."""
        try:
            status = os.stat(self.folder / SAVED_CONFIG)  # which every start writes
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns

    @property
    def memory(self) -> RunMemory:
        """Return what was read of the run before, which is nothing once another run has its folder."""
        begun = self.begun
        if begun not in self._memory:
            self._memory.clear()
        return self._memory.setdefault(begun, RunMemory())

    @property
    def store_bytes(self) -> int:
        """Return the bytes of the store with its write-ahead log."""
        return sum(self.seen[1::2])

    def newest_event(self) -> int | None:
        """Return the number of the newest event, 0 without events; None: unreadable, and `open` says why."""
        path = self.folder / "run.db"
        return newest_event_number(path, QUERY_SECONDS) if path.is_file() else None

    def in_use(self) -> bool:
        """Return whether a process runs the job, at most `HELD_SECONDS` old; without `used`, on this machine."""
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
    """Return the runs in some folders, each once and with a unique name."""
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
