"""The replay buffer: what a step draws from, bounded by age and count, the same after a restart."""

from __future__ import annotations

from types import SimpleNamespace

from palestra.algorithms.base import Replay
from palestra.learner import replay as replay_module
from palestra.learner.replay import ReplayBuffer
from palestra.types.calls import PolicyVersion
from palestra.types.records import BatchManifest
from unit.building import make_chat, make_trajectory

PER_STEP = 4


class Store:
    """Manifests of four episodes a step, and how often each episode was read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.log, self.calls = SimpleNamespace(manifest=self.manifest), SimpleNamespace(trajectories=self.trajectories)

    async def manifest(self, step):
        names = tuple(f"train-{PER_STEP * (step - 1) + n:06d}-00" for n in range(PER_STEP))
        return BatchManifest(
            step=step, versions={"policy": PolicyVersion(0, step - 1)}, episode_ids=names, seed=0, config_digest=""
        )

    async def trajectories(self, names):
        self.read += names
        return [make_trajectory(int(name[6:12]), 0, 1.0, [make_chat(episode_id=name)]) for name in names]


async def all_trainable(_, trajectories):
    return list(trajectories)


def buffer(store=None, trainable=all_trainable, seed=3, **changes) -> ReplayBuffer:
    replay = Replay(**({"draws": 2, "episodes": 3, "max_age": 1} | changes))
    return ReplayBuffer(replay, store or Store(), seed, "policy", trainable)


def names(drawn) -> list[str]:
    return [trajectory.episode.episode_id for trajectory in drawn]


async def test_a_step_draws_without_replacement_in_canonical_order_from_the_steps_that_are_young_enough():
    replay = buffer(episodes=8)
    await replay.begin(5)
    assert names(await replay.draw(5, 0)) == [
        f"train-{n:06d}-00" for n in range(12, 20)
    ]  # all there are: of steps 4 and 5
    replay = buffer()
    await replay.begin(5)
    draws = [names(await replay.draw(5, n)) for n in range(40)]
    assert all(len(set(drawn)) == 3 and drawn == sorted(drawn) for drawn in draws)
    assert {name for drawn in draws for name in drawn} == {f"train-{n:06d}-00" for n in range(12, 20)}


async def test_only_the_newest_episodes_are_kept(monkeypatch):
    monkeypatch.setattr(replay_module, "MOST_EPISODES", 5)
    replay = buffer(max_age=10, episodes=100)
    await replay.begin(3)
    assert names(await replay.draw(3, 0)) == [f"train-{n:06d}-00" for n in range(7, 12)]


async def test_after_a_restart_the_same_is_drawn_and_each_episode_is_read_once_in_a_process():
    store = Store()
    whole = buffer(store)
    drawn = {}
    for step in (1, 2, 3):
        await whole.begin(step)
        drawn[step] = [names(await whole.draw(step, n)) for n in range(2)]
    assert len(store.read) == len(set(store.read)) <= 3 * PER_STEP
    again = buffer()
    await again.begin(3)
    assert [names(await again.draw(3, n)) for n in range(2)] == drawn[3]
    other = buffer(seed=4)
    await other.begin(3)
    assert [names(await other.draw(3, n)) for n in range(2)] != drawn[3]


async def test_what_cannot_be_trained_is_never_drawn():
    async def odd(_, trajectories):
        return [t for t in trajectories if t.episode.group_index % 2]

    replay = buffer(trainable=odd, episodes=100)
    await replay.begin(2)
    assert names(await replay.draw(2, 0)) == [f"train-{n:06d}-00" for n in (1, 3, 5, 7)]


async def test_nothing_to_draw_from_gives_an_empty_batch():
    async def none(_, __):
        return []

    replay = buffer(trainable=none)
    await replay.begin(1)
    assert await replay.draw(1, 0) == []


async def test_each_episode_is_looked_at_once_and_a_restart_reads_only_what_it_draws():
    store, asked = Store(), []

    async def odd(name, trajectories):
        asked.extend(t.episode.episode_id for t in trajectories)
        return [t for t in trajectories if t.episode.group_index % 2]

    whole = buffer(store, trainable=odd)
    drawn = {}
    for step in (1, 2, 3):
        await whole.begin(step)
        drawn[step] = [names(await whole.draw(step, n)) for n in range(6)]
    assert len(asked) == len(set(asked))
    again, asked[:] = buffer(Store(), trainable=odd), []
    await again.begin(3)
    assert [names(await again.draw(3, n)) for n in range(6)] == drawn[3]
    assert all(name in {f"train-{n:06d}-00" for n in range(4, 12)} for name in asked)
