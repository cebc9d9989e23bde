from __future__ import annotations

import pytest
import sqlalchemy as sa

from palestra.errors import NotFound, StoreError
from palestra.store.browsing import browse, list_episodes, read_episode
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.calls import PolicyVersion
from palestra.types.records import BatchManifest
from palestra.types.states import EpisodeState
from unit.building import TASK, make_chat


async def played(store, clock) -> None:
    """Training: one ended with 2 calls, one ended with none, one discarded, one registered; validation: one claimed."""
    await store.groups.register("train", 0, 3, TASK, 4)
    for request in "abc":
        clock.advance(1)
        await store.episodes.claim("w", request, None)
    await store.calls.append(make_chat(completion=(1, 2, 3)))
    await store.calls.append(make_chat(index=1, completion=(4,)))
    await store.episodes.end("train-000000-00", 1, EpisodeEnd(rewards={"x": 1.0, "y": 0.5}, metadata={"answer": "2"}))
    await store.episodes.end("train-000000-01", 1, EpisodeEnd(rewards={"agent": -1.0}))
    await store.episodes.abort("train-000000-02", 1, "no network", discard=True)
    await store.groups.register("validation", 0, 0, TASK, 1)
    await store.episodes.claim("w", "d", None)
    await store.log.commit_manifest(
        BatchManifest(
            step=3,
            versions={"policy": PolicyVersion(0, 2)},
            episode_ids=("train-000000-00",),
            seed=0,
            config_digest="d",
        )
    )


async def test_a_list_says_what_became_of_each_episode(store, clock, tmp_path):
    await played(store, clock)
    with browse(tmp_path / "run.db") as connection:
        found = list_episodes(connection, "train", None, 10)
    assert [(e.episode_id[-2:], e.state, e.reward, e.calls, e.tokens, e.attempts, e.reason) for e in found] == [
        ("00", "completed", 1.5, 2, 4, 1, None),
        ("01", "completed", -1.0, 0, 0, 1, None),
        ("02", "discarded", None, 0, 0, 1, "no network"),
        ("03", "registered", None, 0, 0, 0, None),
    ]
    assert found[0].metadata == {"answer": "2"}


async def test_a_list_may_be_of_one_kind_or_state_and_is_of_the_newest(store, clock, tmp_path):
    await played(store, clock)
    with browse(tmp_path / "run.db") as connection:
        assert len(list_episodes(connection, None, None, 10)) == 5
        assert [e.episode_id for e in list_episodes(connection, None, "claimed", 10)] == ["validation-000000-00"]
        newest = list_episodes(connection, "train", None, 2)
    assert [e.episode_id[-2:] for e in newest] == ["01", "02"]


async def test_an_episode_is_shown_with_its_calls_and_its_step(store, clock, tmp_path):
    await played(store, clock)
    with browse(tmp_path / "run.db") as connection:
        one = read_episode(connection, "train-000000-00")
        other = read_episode(connection, "train-000000-01")
        with pytest.raises(NotFound):
            read_episode(connection, "nope")
    assert [c.completion_ids.tolist() for c in one.trajectory.chats] == [[1, 2, 3], [4]]
    assert one.step == 3
    assert (other.step, other.trajectory.episode.state) == (None, EpisodeState.COMPLETED)


async def test_looking_writes_nothing_and_does_not_keep_others_from_writing(store, clock, tmp_path):
    await played(store, clock)
    with browse(tmp_path / "run.db") as connection:
        before = len(list_episodes(connection, None, None, 99))
        await store.groups.register("train", 1, 1, TASK, 2)
        assert len(list_episodes(connection, None, None, 99)) == before
    with (
        pytest.raises(StoreError, match="readonly"),
        browse(tmp_path / "run.db") as connection,
    ):
        connection.execute(sa.text("DELETE FROM episodes"))
    with browse(tmp_path / "run.db") as connection:
        assert len(list_episodes(connection, None, None, 99)) == before + 2


@pytest.mark.parametrize("content", [None, b"", b"rubbish " * 1000])
def test_what_is_no_run_store_is_a_store_error(tmp_path, content):
    path = tmp_path / "x.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=r"x\.db"), browse(path) as connection:
        list_episodes(connection, None, None, 1)
    assert path.exists() == (content is not None)
