"""A run in a folder, as `palestra top` draws it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from sqlalchemy import Connection, select

from palestra.dashboard.answers import RunAnswer
from palestra.dashboard.progress import describe_run
from palestra.dashboard.runs import DAMAGED, Run
from palestra.dashboard.steps import slow_calls
from palestra.errors import PalestraError
from palestra.extensions import extensions, load_extension
from palestra.store.browsing import last_of_states
from palestra.store.counting import KINDS, SETTLED_STATES
from palestra.store.run_log import readable_metrics
from palestra.store.search import readable_summaries
from palestra.store.tables import episodes
from palestra.terminal import one_line
from palestra.types.metrics import names_of_policies
from palestra.types.progress import duration
from palestra.types.states import EpisodeState
from palestra_inspect.episode_list import reward_text
from palestra_inspect.top_view import CURVES, NEWEST, calls_table, curve_lines, episodes_table, fitted_table

ENDED = (EpisodeState.UNJUDGED, *SETTLED_STATES)
TABLES = "palestra.tables"
LOOKED_AT = 500  # episodes of each kind and state, among which the newest are looked for


class WatchedFolder:
    """A run in a folder; see `palestra_inspect.top_view.WatchedRun`."""

    def __init__(self, run: Run) -> None:
        """Create without reading the run."""
        self._run = run

    def described(self) -> RunAnswer:
        """Return how far the run is; see `WatchedRun`."""
        return describe_run(self._run)

    def drawn(self, width: int, now: float) -> list[RenderableType]:
        """Return curves, episodes and slow calls; a part that cannot be read says why; see `WatchedRun`."""
        parts: tuple[Callable[[Connection], list[RenderableType]], ...] = (
            lambda connection: curve_lines(_rows(self._run, connection), width),
            lambda connection: _tables(self._run.folder, width),
            lambda connection: [Text(), _ended(connection, width, now)],
            lambda connection: [Text(), calls_table(slow_calls(connection), width, now)],
        )
        return [line for part in parts for line in _part(self._run, part)]


def _part(run: Run, draw: Callable[[Connection], list[RenderableType]]) -> list[RenderableType]:
    """Return what is drawn of a run; if it cannot be read, why."""
    try:
        with run.open() as connection:
            return draw(connection)
    except PalestraError as error:
        return [Text(one_line(str(error)))]
    except DAMAGED as error:
        return [Text(one_line(f"a record can't be read: {type(error).__name__}: {error}"))]


def _tables(folder: Path, width: int) -> list[RenderableType]:
    """Return the tables that other packages have of a run."""
    found = [table for point in extensions(TABLES).values() if (table := load_extension(point)(folder)) is not None]
    return [line for names, rows in found for line in (Text(), fitted_table(names, rows, width, names[2:], names[1:2]))]


def _rows(run: Run, connection: Connection) -> list[dict[str, float]]:
    """Return the metrics that have a curve, of all steps; those of steps that were read before are kept."""
    known = run.memory.rows
    new = readable_metrics(connection, after=int(known[-1]["step"]) if known else -1).rows
    names = ["step", *(name for curve, _ in CURVES for name in names_of_policies(new, curve))]
    known += [{name: row[name] for name in names if name in row} for row in new]
    return known


def _ended(connection: Connection, width: int, now: float) -> Table:
    newest = last_of_states(connection, KINDS, ENDED, LOOKED_AT, episodes.c.episode_id, episodes.c.ended_at)
    names = [row.episode_id for row in nlargest(NEWEST, newest, key=lambda row: row.ended_at or 0.0)]
    wanted = select(episodes).where(episodes.c.episode_id.in_(names)).order_by(episodes.c.ended_at.desc())
    rows, found = connection.execute(wanted).all(), []
    for row, line in zip(rows, readable_summaries(connection, rows), strict=True):
        ended = f"{duration(now - row.ended_at)} ago" if isinstance(row.ended_at, float) else ""
        if line.damaged is None:
            counts = (str(line.calls), str(line.tokens))
            found.append((line.episode_id, line.task_id, line.state, reward_text(line), *counts, ended))
        else:
            found.append((line.episode_id, "", "damaged", "", "", "", ended))
    return episodes_table("episodes that ended", found, width, "ended")
