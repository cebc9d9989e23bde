"""In-memory counts of unfinished episodes by group, which save queries at each end of an episode."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from palestra.database import Notifier
from palestra.store.lifecycle import group_name
from palestra.types.records import EpisodeKind


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
