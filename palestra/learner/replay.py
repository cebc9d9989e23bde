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

Trainable = Callable[[str, Sequence[Trajectory]], Awaitable[list[Trajectory]]]


class ReplayBuffer:
    """The newest episodes of a job, in canonical order; what was drawn is kept while it may be drawn again."""

    def __init__(self, replay: Replay, store: RunStore, seed: int, policy: str, trainable: Trainable) -> None:
        """Begin empty.

        Args:
            replay: how many episodes, of which age, and how many are drawn.
            seed: of the job; what is drawn depends on it.
            policy: episodes in which it has sampled nothing are left out.
            trainable: returns those of some episodes that can be trained; is called once for each episode and process.
        """
        self._replay, self._store, self._seed = replay, store, seed
        self._policy, self._trainable = policy, trainable
        self._manifests: dict[int, tuple[str, ...]] = {}  # episodes of each step that is young enough
        self._names: list[str] = []
        self._kept: dict[str, Trajectory | None] = {}  # by episode id, as drawn; None: it can't be trained

    @property
    def draws(self) -> int:
        """Return how many batches a step draws."""
        return self._replay.draws

    async def begin(self, step: int) -> None:
        """Find out which episodes a step may draw, and forget those that are too old or too many.

        Args:
            step: number of the step, whose manifest is committed.
        """
        young = range(max(1, step - self._replay.max_age), step + 1)
        for number in young:
            if number not in self._manifests:
                manifest = await self._store.log.manifest(number)
                self._manifests[number] = () if manifest is None else manifest.episode_ids
        self._manifests = {number: self._manifests[number] for number in young}
        names = [name for number in young for name in self._manifests[number]]
        self._names = names[-self._replay.max_episodes :]
        known = set(self._names)
        self._kept = {name: trajectory for name, trajectory in self._kept.items() if name in known}

    async def draw(self, step: int, number: int) -> list[Trajectory]:
        """Return the episodes of one batch, in canonical order, without those that can't be trained.

        Names are drawn, and only what is drawn is read, so that a job that is resumed need not read all.

        Args:
            step: number of the step for which `begin` was called.
            number: of the batch in the step, from 0.
        """
        draw = np.random.default_rng((self._seed, step, number))
        chosen = draw.choice(len(self._names), min(self._replay.episodes, len(self._names)), replace=False)
        names = [self._names[place] for place in sorted(chosen.tolist())]
        new = await self._store.calls.trajectories([name for name in names if name not in self._kept])
        played = [t for t in new if any(chat.policy == self._policy for chat in t.chats)]
        good = await self._trainable(f"step {step} draw {number}", played) if played else ()
        self._kept |= {trajectory.episode.episode_id: None for trajectory in new}
        self._kept |= {trajectory.episode.episode_id: trajectory for trajectory in good}
        found = [self._kept[name] for name in names]
        return [trajectory for trajectory in found if trajectory is not None]
