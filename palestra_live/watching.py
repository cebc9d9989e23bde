"""The versions of a live run, with their sessions, as `palestra top` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import select

from palestra.database.sqlite import open_engine
from palestra.types.progress import short_number
from palestra_live.gate import ledger
from palestra_live.gate.records import GateDecision
from palestra_live.store import FILE, SessionState, feedback, sessions

NAMES = ("version", "stage", "sessions", "open", "with a score", "mean score", "feedback")


def table_of(folder: Path) -> tuple[Sequence[str], list[Sequence[str]]] | None:
    """Return the columns and rows of a run's versions, the newest first; None: it is no live run."""
    if not (folder / FILE).is_file():
        return None
    of = sessions.c.policy
    opened = sa.func.sum(sa.case((sessions.c.state == SessionState.OPEN.value, 1), else_=0))
    scores = sa.func.count(sessions.c.score), sa.func.avg(sessions.c.score)
    used = select(of, sa.func.count(), opened, *scores).group_by(of)
    given = select(of, sa.func.count()).join(feedback, feedback.c.session_id == sessions.c.session_id).group_by(of)
    found, fed = _rows(folder / FILE, used), {name: count for name, count in _rows(folder / FILE, given)}
    stages = _stages(folder / ledger.FILE)
    rows: list[Sequence[str]] = []
    for policy, count, now, scored, mean in sorted(found, key=lambda row: -_version(row[0])):
        version = _version(policy)
        stage = "the newest weights serve" if version < 0 else stages.get(version, "")
        name = policy if version < 0 else str(version)
        rows.append((name, stage, str(count), str(now), str(scored), short_number(mean), str(fed.get(policy, 0))))
    return NAMES, rows


def _version(policy: str) -> int:
    """Return the version that a session was served by; -1: there is no gate, and each call had the newest."""
    _, found, step = policy.rpartition("@step-")
    return int(step) if found else -1


def _stages(path: Path) -> dict[int, str]:
    """Return the last stage of each version, in words."""
    if not path.is_file():
        return {}
    rows = _rows(path, select(ledger.decisions.c.data).order_by(ledger.decisions.c.number))
    made = [msgspec.json.decode(data, type=GateDecision) for (data,) in rows]
    return {one.version: one.after.replace("_", " ") for one in made if one.after is not None}


def _rows(path: Path, wanted: sa.Select[Any]) -> list[tuple[Any, ...]]:
    engine = open_engine(path, "FULL", read_only=True)
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(wanted)]
    finally:
        engine.dispose()
