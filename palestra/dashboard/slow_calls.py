"""The slowest of a run's newest calls."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from palestra.dashboard.answers import SlowCall, SlowCallsAnswer
from palestra.dashboard.runs import Run
from palestra.store.tables import chats

SLOWEST, LOOKED_AT = 5, 2000  # calls, of the newest ones


def slow_calls(connection: Connection) -> list[SlowCall]:
    """Return the slowest of the newest calls, slowest first, without damaged ones."""
    seconds = (chats.c.finished_at - chats.c.started_at).label("seconds")
    recent = select(chats.c.episode_id, chats.c.idx, chats.c.agent, chats.c.finished_at, seconds)
    newest = recent.order_by(chats.c.finished_at.desc()).limit(LOOKED_AT).subquery()
    found = connection.execute(select(newest).order_by(newest.c.seconds.desc()).limit(SLOWEST))
    return [one for row in found if (one := _readable(row)) is not None]


def _readable(row: Any) -> SlowCall | None:
    """Return a call; None: its record is damaged."""
    try:
        return SlowCall(
            episode_id=row.episode_id, call=row.idx, agent=row.agent, seconds=row.seconds, ended=row.finished_at
        )
    except ValueError:
        return None


def read_slow_calls(run: Run) -> SlowCallsAnswer:
    """Return the slowest of a run's newest calls."""
    with run.open() as connection:
        return SlowCallsAnswer(run=run.name, calls=slow_calls(connection))
