"""Experience replay: a step draws episodes from its own and earlier manifests; the run store is the buffer.

Manifests, the seed and the step number determine the draws, so that a step repeated after a crash draws the same
episodes; checkpoints contain no buffer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from palestra.algorithms.base import Replay
from palestra.store import RunStore
from palestra.types.records import Trajectory

MOST_EPISODES = 4096  # that are drawn from, the newest ones: their ids are held in memory

Trainable = Callable[[str, Sequence[Trajectory]], Awaitable[list[Trajectory]]]


class ReplayBuffer:
    """The newest episodes of a job, in canonical order; drawn ones are cached while they may be drawn again."""

    def __init__(self, replay: Replay, store: RunStore, seed: int, policy: str, trainable: Trainable) -> None:
        """Begin empty. Episodes without samples of `policy` are left out. `trainable` returns the trainable ones of
        some episodes, and is called once for each episode and process.
        """
        self._replay, self._store, self._seed = replay, store, seed
        self._policy, self._trainable = policy, trainable
        self._manifests: dict[int, tuple[str, ...]] = {}  # episodes of each step that is young enough
        self._names: list[str] = []
        self._kept: dict[str, Trajectory | None] = {}  # by episode id, as drawn; None: it can't be trained

    @property
    def draws(self) -> int:
        """Return the number of batches per step."""
        return self._replay.draws

    async def begin(self, step: int) -> None:
        """Determine the episodes that a step may draw, and drop old and excess ones."""
        young = range(max(1, step - self._replay.max_age), step + 1)
        for number in young:
            if number not in self._manifests:
                manifest = await self._store.log.manifest(number)
                self._manifests[number] = () if manifest is None else manifest.episode_ids
        self._manifests = {number: self._manifests[number] for number in young}
        names = [name for number in young for name in self._manifests[number]]
        self._names = names[-MOST_EPISODES:]
        known = set(self._names)
        self._kept = {name: trajectory for name, trajectory in self._kept.items() if name in known}

    async def draw(self, step: int, number: int) -> list[Trajectory]:
        """Return the trainable episodes of one batch, in canonical order.

        Ids are drawn, and only drawn episodes are read, so that a resumed job need not read all. `number` counts the
        step's batches from 0.
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
