"""How many episodes a run has in each state and group, without a query each time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple, get_args

from sqlalchemy import Connection

from palestra.database import Notifier
from palestra.database.sqlite import sqlite_connection
from palestra.store.lifecycle import group_name
from palestra.types.records import EpisodeKind
from palestra.types.states import EpisodeState

KINDS: tuple[EpisodeKind, ...] = get_args(EpisodeKind)
OPEN_STATES = (EpisodeState.REGISTERED, EpisodeState.CLAIMED, EpisodeState.UNJUDGED)
SETTLED_STATES = (EpisodeState.COMPLETED, EpisodeState.DISCARDED)
_FIRST_OPEN = "SELECT min(group_index) FROM episodes WHERE state = ? AND kind = ?"
_FIRST_UNFINISHED = (
    "SELECT min(group_index) FROM groups WHERE kind = ? AND step > (SELECT coalesce(max(step), -1) FROM metric_rows)"
)
_END = "SELECT coalesce(max(group_index), -1) + 1 FROM episodes WHERE kind = ?"
_COUNT = "SELECT count(*) FROM episodes WHERE state = ? AND kind = ? AND group_index >= ? AND group_index < ?"


class EpisodeCounts:
    """Counts the episodes of one run again and again. It keeps the counts of those that cannot change any more."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._until = dict.fromkeys(KINDS, 0)  # groups before this one are counted, and do not change
        self._settled = {(kind, state): 0 for kind in KINDS for state in SETTLED_STATES}

    def read(self, connection: Connection) -> dict[str, dict[str, int]]:
        """Return the number of episodes by kind and state; what has none is left out."""
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            for kind in KINDS:
                until = max(_first_changing(connection, kind), self._until[kind])
                own = {state: _count(connection, kind, state, 0) for state in OPEN_STATES}
                own |= {state: _count(connection, kind, state, until) for state in SETTLED_STATES}
                more = {state: _count(connection, kind, state, self._until[kind], until) for state in SETTLED_STATES}
                self._until[kind] = until
                for state, count in more.items():
                    self._settled[kind, state] += count
                    own[state] += self._settled[kind, state]
                if any(own.values()):
                    found[kind] = {state.value: count for state, count in own.items() if count}
        return found


def _first_changing(connection: Connection, kind: EpisodeKind) -> int:
    """Return the first group that has an open episode, or is of a step that is not finished and may get more."""
    execute = sqlite_connection(connection).execute
    firsts = [execute(_FIRST_OPEN, (state.value, kind)).fetchone()[0] for state in OPEN_STATES]
    firsts.append(execute(_FIRST_UNFINISHED, (kind,)).fetchone()[0])
    known = [first for first in firsts if first is not None]
    return min(known) if known else int(execute(_END, (kind,)).fetchone()[0])


def _count(connection: Connection, kind: str, state: EpisodeState, first: int, until: int = 2**62) -> int:
    """Return how many episodes of groups from `first` until before `until` are in a state."""
    return int(sqlite_connection(connection).execute(_COUNT, (state.value, kind, first, until)).fetchone()[0])


class _Open(NamedTuple):
    kind: EpisodeKind
    step: int
    episodes: int  # that may still be completed


class OpenGroups:
    """Follows the committed changes of the store.

    After a database error a group may seem open forever, so waiting callers also query the store every `WAKE_SECONDS`.

    Attributes:
        settled: notified when a group's last open episode was completed or discarded.
    """

    def __init__(self, found: Iterable[tuple[EpisodeKind, int, int, int]] = ()) -> None:
        """Create the counts from the groups of a store. `found`: (kind, step, group index, open episodes) of each."""
        self.settled = Notifier()
        self._groups: dict[str, _Open] = {}  # by name
        self._of_step: Counter[tuple[EpisodeKind, int]] = Counter()
        for each in found:
            self.add(*each)

    def add(self, kind: EpisodeKind, step: int, group_index: int, episodes: int) -> None:
        """Count registered episodes."""
        name = group_name(kind, group_index)
        if (known := self._groups.get(name)) is None:
            self._of_step[kind, step] += 1
        self._groups[name] = _Open(kind, step, episodes + (0 if known is None else known.episodes))

    def ended(self, episode_id: str) -> None:
        """Count a completed or discarded episode; those outside the schedule have no group."""
        name = episode_id.rpartition("-")[0]
        if (group := self._groups.get(name)) is None:
            return
        if group.episodes > 1:
            self._groups[name] = group._replace(episodes=group.episodes - 1)
            return
        del self._groups[name]
        self._of_step[group.kind, group.step] -= 1
        self.settled.notify()

    def number(self, kind: EpisodeKind, step: int) -> int:
        """Return the number of open groups of a step."""
        return self._of_step[kind, step]

    async def wait(self, kind: EpisodeKind, step: int, below: int, seconds: float) -> None:
        """Wait until fewer than `below` groups of a step are open, or for the given time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.number(kind, step) >= below:
                    await self.settled.wait(seconds, self.settled.count)
