"""The groups of which an episode may still be completed, counted in memory, so that no end has to ask the store."""

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

    After an error of the database a group may seem to be open for ever, so whoever waits also looks into the store,
    every `WAKE_SECONDS`.

    Attributes:
        settled: notified when the last open episode of a group was completed or discarded.
    """

    def __init__(self, found: Iterable[tuple[EpisodeKind, int, int, int]] = ()) -> None:
        """Begin with the groups of a store.

        Args:
            found: (kind, step, group index, open episodes) of each.
        """
        self.settled = Notifier()
        self._groups: dict[str, _Open] = {}  # by name
        self._of_step: Counter[tuple[EpisodeKind, int]] = Counter()
        for each in found:
            self.add(*each)

    def add(self, kind: EpisodeKind, step: int, group_index: int, episodes: int) -> None:
        """Count episodes that were registered."""
        name = group_name(kind, group_index)
        if (known := self._groups.get(name)) is None:
            self._of_step[kind, step] += 1
        self._groups[name] = _Open(kind, step, episodes + (0 if known is None else known.episodes))

    def ended(self, episode_id: str) -> None:
        """Count an episode that was completed or discarded; those outside the schedule have no group."""
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
        """Return how many groups of a step are open."""
        return self._of_step[kind, step]

    async def wait(self, kind: EpisodeKind, step: int, below: int, seconds: float) -> None:
        """Return when fewer than `below` groups of a step are open, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.number(kind, step) >= below:
                    await self.settled.wait(seconds, self.settled.count)
