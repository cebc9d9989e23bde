"""A run in a folder, read as its page is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from pathlib import Path
from typing import TypeVar

from rich.console import RenderableType
from sqlalchemy import select

from palestra.dashboard.answers import EpisodeDetail, MetricsAnswer, RunAnswer, SlowCall, TokensAnswer
from palestra.dashboard.progress import describe_run, read_columns
from palestra.dashboard.runs import DAMAGED, Run
from palestra.dashboard.steps import MOST_TEXT, read_slow_calls
from palestra.errors import PalestraError, StoreError
from palestra.extensions import extensions, load_extension
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.renderers.picture_layout import layout_fact, read_layout
from palestra.store.browsing import browse, last_of_states, newest_rows, pieces_of_rows, trained_steps
from palestra.store.counting import KINDS
from palestra.store.run_log import read_fact
from palestra.store.search import readable_summaries
from palestra.store.tables import episodes
from palestra.types.states import ENDED
from palestra.types.summaries import EpisodeSummary
from palestra_inspect.terminal_pictures import TerminalPicture, protocol_of

T = TypeVar("T")
RunTable = tuple[Sequence[str], list[Sequence[str]]]
TABLES = "palestra.tables"
LOOKED_AT = 500  # episodes of each kind and state, among which the newest are looked for


class FolderRun:
    """A run in a folder; its methods are those of `palestra_inspect.served_run.ServedRun`."""

    def __init__(self, run: Run) -> None:
        """Create without reading the run."""
        self._run, self._store = run, run.folder / "run.db"

    @classmethod
    def at(cls, folder: Path) -> FolderRun:
        """Return the run in a folder."""
        return cls(Run(name=folder.name, folder=folder))

    def described(self) -> RunAnswer:
        """Return how far the run is."""
        return describe_run(self._run)

    def metrics(self, after: int = -1) -> MetricsAnswer:
        """Return the metrics of the steps after `after`."""
        return _readable(lambda: read_columns(self._run, after))

    def slow_calls(self) -> list[SlowCall]:
        """Return the slowest of the newest calls."""
        return _readable(lambda: read_slow_calls(self._run).calls)

    def episode(self, episode_id: str, whole: bool = False) -> EpisodeDetail:
        """Return an episode with its calls. `whole`: also texts that are too long for a page."""
        from palestra.dashboard.episode import episode_answer, read_reading  # loads the learner, which takes a second

        self._reading = read_reading(self._run, episode_id)
        return episode_answer(self._run, self._reading, sys.maxsize if whole else MOST_TEXT)

    def tokens(self, episode_id: str, row: int, start: int) -> TokensAnswer:
        """Return the next tokens of a row of the episode that was read last."""
        from palestra.dashboard.episode import MOST_TOKENS, read_tokens

        return read_tokens(self._run, self._reading, row, start, MOST_TOKENS)

    def newest(self, kind: str | None, state: str | None, most: int) -> tuple[list[EpisodeSummary], dict[str, int]]:
        """Return the episodes that were claimed last, in canonical order, and the steps that trained them, by id."""
        with browse(self._store) as connection:
            rows = newest_rows(connection, kind, state, most)
            return readable_summaries(connection, rows), trained_steps(connection, rows)

    def every(self, kind: str | None, state: str | None) -> Iterator[list[EpisodeSummary]]:
        """Yield all episodes, a piece at a time."""
        with browse(self._store) as connection:
            for rows in pieces_of_rows(connection, kind, state):
                yield readable_summaries(connection, rows)

    def ended(self, most: int) -> list[EpisodeSummary]:
        """Return the episodes that ended last, the newest first."""

        def read() -> list[EpisodeSummary]:
            with self._run.open() as connection:
                newest = last_of_states(connection, KINDS, ENDED, LOOKED_AT, episodes.c.episode_id, episodes.c.ended_at)
                names = [row.episode_id for row in nlargest(most, newest, key=lambda row: row.ended_at or 0.0)]
                rows = connection.execute(select(episodes).where(episodes.c.episode_id.in_(names))).all()
                return readable_summaries(connection, sorted(rows, key=lambda row: names.index(row.episode_id)))

        return _readable(read)

    def tables(self) -> list[RunTable]:
        """Return the tables that other packages have of the run: names of columns, and rows."""
        makers: list[Callable[[Path], RunTable | None]] = list(map(load_extension, extensions(TABLES).values()))
        return _readable(lambda: [table for make in makers if (table := make(self._run.folder)) is not None])

    def picture(self, digest: str, policy: str) -> RenderableType:
        """Return a picture as the model of a policy got it."""
        with browse(self._store) as connection:
            fact = read_fact(connection, layout_fact(policy))
        layout = None if fact is None else read_layout(fact)
        return TerminalPicture(Blobs(self._run.folder / FOLDER), digest, protocol_of(os.environ), layout)


def _readable(read: Callable[[], T]) -> T:
    """Return what a function reads; an error of a damaged record becomes a StoreError."""
    try:
        return read()
    except PalestraError:
        raise
    except DAMAGED as error:
        raise StoreError(f"a record can't be read: {type(error).__name__}: {error}") from error
