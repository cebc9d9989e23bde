"""The calls of a run that took longest, of its newest episodes."""

from __future__ import annotations

from heapq import nlargest
from typing import Any

from sqlalchemy import Connection, select

from palestra.dashboard.answers import SlowCall, SlowCallsAnswer
from palestra.dashboard.runs import Run
from palestra.store.browsing import last_of_states
from palestra.store.counting import KINDS
from palestra.store.tables import chats, episodes
from palestra.types.states import EpisodeState

SLOWEST, LOOKED_AT = 5, 200  # calls, and the newest episodes whose calls are looked at


def slow_calls(connection: Connection) -> list[SlowCall]:
    """Return the slowest calls of the newest episodes, slowest first, without damaged ones."""
    states = [state for state in EpisodeState if state is not EpisodeState.REGISTERED]
    columns = (episodes.c.episode_id, episodes.c.claimed_at)
    newest = last_of_states(connection, KINDS, states, LOOKED_AT, *columns)
    names = [row.episode_id for row in nlargest(LOOKED_AT, newest, key=lambda row: row.claimed_at or 0.0)]
    seconds = (chats.c.finished_at - chats.c.started_at).label("seconds")
    found = select(chats.c.episode_id, chats.c.idx, chats.c.agent, chats.c.finished_at, seconds)
    slowest = found.where(chats.c.episode_id.in_(names)).order_by(seconds.desc()).limit(SLOWEST)
    return [one for row in connection.execute(slowest) if (one := _readable(row)) is not None]


def _readable(row: Any) -> SlowCall | None:
    """Return a call; None: its record is damaged."""
    try:
        return SlowCall(
            episode_id=row.episode_id, call=row.idx, agent=row.agent, seconds=row.seconds, ended=row.finished_at
        )
    except ValueError:
        return None


def read_slow_calls(run: Run) -> SlowCallsAnswer:
    """Return the slowest calls of the newest episodes of a run."""
    with run.open() as connection:
        return SlowCallsAnswer(run=run.name, calls=slow_calls(connection))
