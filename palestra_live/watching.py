"""The versions of a live run, with their sessions, as `palestra top` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from palestra.database.sqlite import open_engine
from palestra.types.progress import short_number
from palestra_live.gate import ledger
from palestra_live.gate.records import GateDecision
from palestra_live.store import FILE

NAMES = ("version", "stage", "sessions", "open", "with a score", "mean score", "feedback")
_GIVEN = "(SELECT count(*) FROM feedback WHERE session_id = sessions.session_id AND kind != 'judged')"
_COUNTS = f"count(*), sum(state = 'open'), count(score), avg(score), sum({_GIVEN})"
_USED = f"SELECT policy, {_COUNTS} FROM sessions GROUP BY policy"
_CLUSTERS = f"SELECT cluster, count(DISTINCT policy), {_COUNTS} FROM sessions GROUP BY cluster ORDER BY 3 DESC LIMIT 20"
_DECIDED = "SELECT data FROM decisions ORDER BY number"


def table_of(folder: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """Return the columns and rows of a run's versions, the newest first; None: it is no live run."""
    if not (folder / FILE).is_file():
        return None
    decided = [msgspec.json.decode(data, type=GateDecision) for (data,) in _rows(folder / ledger.FILE, _DECIDED)]
    stages = {one.version: one.after.replace("_", " ") for one in decided if one.after is not None}
    rows = []
    for policy, *counts, mean, given in sorted(_rows(folder / FILE, _USED), key=lambda row: -_version(row[0])):
        version = _version(policy)
        name = (policy, "the newest weights serve") if version < 0 else (str(version), stages.get(version, ""))
        rows.append((*name, *map(str, counts), short_number(mean), str(given)))
    return NAMES, rows


def clusters_of(folder: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """Return the columns and rows of a run's largest clusters of sessions; None: no session names one."""
    rows = _rows(folder / FILE, _CLUSTERS)
    if not any(cluster for cluster, *_ in rows):
        return None
    return ("cluster", "versions", *NAMES[2:]), [
        (cluster or "without one", *map(str, counts), short_number(mean), str(given))
        for cluster, *counts, mean, given in rows
    ]


def _version(policy: str) -> int:
    """Return the version that a session was served by; -1: there is no gate, and each call had the newest."""
    _, found, step = policy.rpartition("@step-")
    return int(step) if found else -1


def _rows(path: Path, wanted: str) -> list[tuple[Any, ...]]:
    if not path.is_file():
        return []
    engine = open_engine(path, "FULL", read_only=True)
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(wanted))]
    finally:
        engine.dispose()
