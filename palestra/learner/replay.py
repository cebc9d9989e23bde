"""The episodes that a step draws from, of its own manifest and of those before: the run store is the replay buffer.

What a step draws follows from the manifests, the seed and the number of the step alone, so that a step that is repeated
after a crash draws the same episodes; nothing of the buffer is in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from palestra.algorithms.base import Replay
from palestra.store import RunStore
from palestra.types.records import Trajectory

Trainable = Callable[[int, Sequence[Trajectory]], Awaitable[list[Trajectory]]]


class ReplayBuffer:
    """The newest trainable episodes of a job, in canonical order, kept in memory as long as they may be drawn."""

    def __init__(self, replay: Replay, store: RunStore, seed: int, policy: str, trainable: Trainable) -> None:
        """Begin empty; `fill` reads the store.

        Args:
            replay: how many episodes, of which age, and how many are drawn.
            store: has the manifests and the episodes.
            seed: of the job; what is drawn depends on it.
            policy: episodes in which it has sampled nothing are left out.
            trainable: returns those of some episodes that can be trained; is called once for each episode and process.
        """
        self._replay, self._store, self._seed = replay, store, seed
        self._policy, self._trainable = policy, trainable
        self._kept: dict[str, Trajectory | None] = {}  # by episode id; None: it can't be trained

    @property
    def draws(self) -> int:
        """Return how many batches a step draws."""
        return self._replay.draws

    async def fill(self, step: int) -> None:
        """Take in the episodes that a step may draw, and forget those that are too old or too many.

        Args:
            step: number of the step, whose manifest is committed.
        """
        wanted: list[str] = []
        for number in range(max(1, step - self._replay.max_age), step + 1):
            manifest = await self._store.log.manifest(number)
            wanted += () if manifest is None else manifest.episode_ids
        wanted = wanted[-self._replay.max_episodes :]
        new = await self._store.calls.trajectories([name for name in wanted if name not in self._kept])
        played = [t for t in new if any(chat.policy == self._policy for chat in t.chats)]
        good = {t.episode.episode_id: t for t in (await self._trainable(step, played) if played else ())}
        found = {trajectory.episode.episode_id: good.get(trajectory.episode.episode_id) for trajectory in new}
        self._kept = {name: self._kept[name] if name in self._kept else found[name] for name in wanted}

    def draw(self, step: int, number: int) -> list[Trajectory]:
        """Return the episodes of one batch, in canonical order.

        Args:
            step: number of the step for which `fill` was called.
            number: of the batch in the step, from 0.
        """
        known = [trajectory for trajectory in self._kept.values() if trajectory is not None]
        draw = np.random.default_rng((self._seed, step, number))
        chosen = draw.choice(len(known), min(self._replay.episodes, len(known)), replace=False) if known else ()
        return [known[place] for place in sorted(map(int, chosen))]
