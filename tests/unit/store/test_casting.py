"""Who plays a role that has a pool: by the step of the episode and what the store has, and by nothing else."""

from __future__ import annotations

import pytest

from palestra.config import PoolConfig, Roles, RolloutConfig
from palestra.store import open_run_store
from palestra.store.casting import Casting, results
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.states import GroupState
from unit.building import TASK

pytestmark = pytest.mark.ci


def roles(**pool) -> Roles:
    return Roles(default="white", named={"opponent": "white"}, pools={"opponent": PoolConfig(every_steps=2, **pool)})


def opened(path, casting: Casting):
    store = open_run_store(path / "run.db", RolloutConfig())
    store.episodes.casting = casting
    return store


async def played(store, step: int, rewards, groups: int = 12, ready: bool = True):
    """Play a step of `groups` groups of two, and return the players of each episode; `rewards` are made of them."""
    found = {}
    first = await store.groups.next_index("train")
    for index in range(first, first + groups):
        await store.groups.register("train", index, step, TASK, 2)
        for _ in range(2):
            episode = await store.episodes.claim("w", f"{step}-{index}-{_}", None)
            found[episode.episode_id] = episode.players
            given = rewards(episode.players["opponent"])
            await store.episodes.end(episode.episode_id, episode.fence, EpisodeEnd(rewards=given))
        if ready:
            await store.groups.settle("train", {index: GroupState.READY})
    return found


def drawn(player: str) -> dict[str, float]:
    return {"agent": 0.5, "opponent": 0.5}


async def test_a_group_meets_one_version_and_groups_meet_all_of_them(tmp_path):
    with opened(tmp_path, Casting(roles(), 7, 0)) as store:
        assert set(await_players(await played(store, 1, drawn))) == {"white@0"}
        assert set(await_players(await played(store, 2, drawn))) == {"white@0"}
        found = await played(store, 5, drawn)
        assert set(await_players(found)) == {"white@0", "white@2", "white@4"}
        for name, players in found.items():
            assert players == found[name[:-2] + "00"]
            assert (await store.episodes.get(name)).players == players


def await_players(found) -> list[str]:
    return [players["opponent"] for players in found.values()]


async def test_the_seed_decides_and_a_second_attempt_meets_the_same(tmp_path):
    found = {}
    for seed in (1, 2):
        with opened(tmp_path / str(seed), Casting(roles(), seed, 0)) as store:
            found[seed] = await played(store, 9, drawn)
    assert found[1] != found[2]
    with opened(tmp_path / "again", Casting(roles(), 1, 0)) as store:
        await store.groups.register("train", 0, 9, TASK, 2)
        episode = await store.episodes.claim("w", "a", None)
        assert episode.players == found[1][episode.episode_id]
        await store.episodes.abort(episode.episode_id, episode.fence, "lost", discard=False)
        second = await store.episodes.claim("w", "b", None)
        assert (second.episode_id, second.fence, second.players) == (episode.episode_id, 2, episode.players)
        assert (await store.episodes.claim("w", "b", None)) == second  # the same claim, sent again
    with opened(tmp_path / "again", Casting(roles(), 2, 0)) as store:  # what is recorded stays as it is
        assert (await store.episodes.get(second.episode_id)).players == second.players


async def test_episodes_that_are_played_ahead_meet_versions_that_are_there(tmp_path):
    with opened(tmp_path, Casting(roles(), 7, 3)) as store:
        assert set(await_players(await played(store, 5, drawn))) == {"white@0"}
        assert set(await_players(await played(store, 6, drawn))) == {"white@0", "white@2"}


async def test_validation_and_episodes_outside_the_schedule_meet_versions_too(tmp_path):
    casting = Casting(roles(size=1), 7, 0)
    with opened(tmp_path, casting) as store:
        await store.groups.register("validation", 0, 4, TASK, 1)
        assert (await store.episodes.claim("w", "v", None)).players == {"opponent": "white@4"}
        casting.done = 6
        name = await store.episodes.register_adhoc(TASK, "r")
        assert (await store.episodes.claim("w", "a", None, name)).players == {"opponent": "white@6"}


async def test_the_hard_ones_are_drawn_by_the_results_of_earlier_steps_also_after_a_restart(tmp_path):
    def hard(player: str) -> dict[str, float]:
        return {"agent": 0.0, "opponent": 1.0} if player == "white@2" else {"agent": 1.0, "opponent": 0.0}

    kept = roles(choice="prioritized")
    with opened(tmp_path, Casting(kept, 7, 0)) as store:
        for step in (1, 2, 3):
            await played(store, step, hard, groups=20)
        found = await played(store, 4, hard, groups=40)
        assert await_players(found).count("white@2") > 70  # of 80; the loss rate of the other is about 0.01
    for step, after in ((5, 4), (6, 5)):
        seen = []
        for run in range(2):
            with opened(tmp_path, Casting(kept, 7, 0)) as store:
                await store.groups.register("train", 1000 * step + run, step, TASK, 1)
                casting = store.episodes.casting
                episode = await store.episodes.claim("w", f"{step}{run}", None)
                await store.episodes.abort(episode.episode_id, episode.fence, "x", discard=True)
                assert casting._counted == after
                seen.append({name: tuple(total) for name, total in casting._totals.items()})
        assert seen[0] == seen[1]


async def test_a_win_rate_is_that_of_finished_groups_with_one_drawn_game_more(tmp_path):
    kept = roles(choice="prioritized")
    with opened(tmp_path, Casting(kept, 7, 0)) as store:
        await played(store, 1, lambda player: {"agent": 1.0, "opponent": 0.0}, groups=3)
        await played(store, 1, lambda player: {"agent": 0.0, "opponent": 1.0}, groups=5, ready=False)
        await played(store, 2, drawn, groups=1)
        rates = [
            await store.db.read(lambda c, done=done: Casting(kept, 7, 0)._win_rate(c, done, "white@0"))
            for done in (0, 1, 2)
        ]
    assert rates == [0.5, pytest.approx(6.5 / 7), pytest.approx(7.5 / 9)]


def test_who_has_won():
    now = roles()
    for rewards, points in (
        ({"agent": 1.0, "opponent": 0.0}, {"white@5": 1.0}),
        ({"agent": -1.0, "opponent": 0.0}, {"white@5": 0.0}),
        ({"agent": 0.5, "opponent": 0.5}, {"white@5": 0.5}),
        ({"agent": 0.5, "friend": 0.0, "opponent": 0.3}, {"white@5": 0.0}),
        ({"agent": 0.5}, {}),
        ({"opponent": 0.5}, {}),
    ):
        assert results(now, {"opponent": "white@5"}, rewards) == points
    assert results(now, {"opponent": "white"}, {"agent": 1.0, "opponent": 0.0}) == {}
