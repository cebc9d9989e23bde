from __future__ import annotations

import pytest

from palestra.errors import Conflict
from palestra.schemas.records import BatchManifest, PolicyVersion, Task
from unit.building import FakeClock, open_store


def tasks(*names: str, **data) -> list[Task]:
    return [Task(task_id=name, data={"name": name} | data) for name in names]


def manifest(step: int = 1, **changes) -> BatchManifest:
    values = {
        "step": step,
        "version": PolicyVersion(1, 4),
        "episode_ids": ("train-000000-00", "train-000000-03"),
        "seed": 2**63 - 1,
        "config_digest": "d",
    }
    return BatchManifest(**(values | changes))


# Tasks


async def test_tasks_keep_their_order_over_chunks(store):
    assert await store.push_tasks("train", tasks("b", "a"), "1") == 2
    assert await store.push_tasks("train", tasks("d", "c"), "2") == 4
    assert [t.task_id for t in await store.tasks("train")] == ["b", "a", "d", "c"]
    assert (await store.tasks("train"))[0].data == {"name": "b"}


async def test_the_same_chunk_again_is_a_no_op_and_another_under_its_name_a_conflict(store):
    for _ in range(3):
        assert await store.push_tasks("train", tasks("a", "b"), "1") == 2
    for other in (tasks("a"), tasks("b", "a"), tasks("a", "b", more=1), []):
        with pytest.raises(Conflict, match="'1'"):
            await store.push_tasks("train", other, "1")
    assert len(await store.tasks("train")) == 2


async def test_a_task_that_is_known_is_not_added_again(store):
    await store.push_tasks("train", tasks("a", "a"), "1")
    assert await store.push_tasks("train", tasks("b", "a"), "2") == 2
    assert [t.task_id for t in await store.tasks("train")] == ["a", "b"]


async def test_a_task_id_stands_for_one_thing_and_a_refused_chunk_leaves_nothing(store):
    await store.push_tasks("train", tasks("a"), "1")
    with pytest.raises(Conflict, match="'a'"):
        await store.push_tasks("train", [*tasks("new"), *tasks("a", other=1)], "2")
    with pytest.raises(Conflict, match="'x'"):
        await store.push_tasks("train", [*tasks("x"), *tasks("x", other=1)], "3")
    assert [t.task_id for t in await store.tasks("train")] == ["a"]
    assert await store.push_tasks("train", tasks("new"), "2") == 2  # the name of the chunk is still free


async def test_the_splits_are_apart(store):
    await store.push_tasks("train", tasks("a"), "1")
    assert await store.push_tasks("validation", tasks("a", held_out=True), "1") == 1
    assert [t.data for t in await store.tasks("validation")] == [{"name": "a", "held_out": True}]


async def test_after_sealing_only_what_was_there_is_taken(store):
    await store.push_tasks("train", tasks("a"), "1")
    assert not await store.tasks_sealed()
    await store.seal_tasks()
    await store.seal_tasks()
    assert await store.tasks_sealed()
    assert await store.push_tasks("train", tasks("a"), "1") == 1
    with pytest.raises(Conflict, match="no more tasks"):
        await store.push_tasks("train", tasks("b"), "2")


async def test_a_large_chunk_with_repetitions(store):
    many = tasks(*(f"t{i % 1700}" for i in range(2500)))
    assert await store.push_tasks("train", many[:1000], "1") == 1000
    assert await store.push_tasks("train", many, "2") == 1700


# Manifests


async def test_a_manifest_comes_back_as_it_was_fixed(store):
    assert await store.manifest(1) is None
    await store.commit_manifest(manifest())
    assert await store.manifest(1) == manifest()
    assert await store.manifest(2) is None


async def test_a_manifest_is_fixed_once(store):
    await store.commit_manifest(manifest())
    await store.commit_manifest(manifest())
    for change in (
        {"episode_ids": ("train-000000-03", "train-000000-00")},
        {"episode_ids": ()},
        {"seed": 1},
        {"config_digest": "e"},
        {"version": PolicyVersion(1, 5)},
    ):
        with pytest.raises(Conflict, match="step 1"):
            await store.commit_manifest(manifest(**change))
    assert await store.manifest(1) == manifest()


# Metrics, events, facts


async def test_a_row_of_metrics_replaces_that_of_an_undone_step(store):
    await store.put_metrics(2, {"step": 2.0, "x": 1.0})
    await store.put_metrics(1, {"step": 1.0})
    await store.put_metrics(2, {"step": 2.0, "x": 0.1})
    assert await store.metrics() == [{"step": 1.0}, {"step": 2.0, "x": 0.1}]


async def test_an_unfinished_row_is_none_of_the_rows_until_it_is_finished(store):
    await store.put_metrics(1, {"step": 1.0, "wall_seconds": 1.0})
    await store.put_unfinished_metrics({"step": 2.0, "x": 0.1})
    assert [row["step"] for row in await store.metrics()] == [1.0]
    assert await store.restore_metrics(1) is None
    assert await store.restore_metrics(2) == {"step": 2.0, "x": 0.1}
    await store.put_metrics(2, {"step": 2.0, "x": 0.1, "wall_seconds": 2.0})
    assert await store.restore_metrics(2) is None
    assert [row["step"] for row in await store.metrics()] == [1.0, 2.0]


async def test_rows_of_steps_that_will_be_trained_again_are_dropped(store):
    for step in (0, 1, 2, 3):
        await store.put_metrics(step, {"step": step, "wall_seconds": 1.0})
    assert await store.restore_metrics(1) is None
    assert [row["step"] for row in await store.metrics()] == [0, 1]


async def test_an_unfinished_row_that_an_earlier_version_left_among_the_others_is_taken_out(store):
    await store.put_metrics(0, {"step": 0.0, "wall_seconds": 1.0})
    await store.put_metrics(1, {"step": 1.0, "x": 0.5})
    for _ in range(2):
        assert await store.restore_metrics(1) == {"step": 1.0, "x": 0.5}
        assert [row["step"] for row in await store.metrics()] == [0.0]


async def test_events_are_replayed_from_any_of_them(store, clock):
    made = []
    for number in range(5):
        clock.advance(1)
        made.append(await store.add_event("k", {"number": number}))
    assert await store.events(0) == made
    assert await store.events(made[2].event_id) == made[3:]
    assert await store.events(0, limit=2) == made[:2]
    assert [e.at for e in made] == [clock.wall - 4 + n for n in range(5)]


async def test_facts_may_be_changed(store):
    assert await store.meta("k") is None
    for value in ("1", "2"):
        await store.set_meta("k", value)
        assert await store.meta("k") == value


async def test_all_of_it_is_there_after_a_restart(tmp_path):
    with open_store(tmp_path, FakeClock()) as store:
        await store.push_tasks("train", tasks("a"), "1")
        await store.seal_tasks()
        await store.commit_manifest(manifest())
        event = await store.add_event("k", {})
        await store.set_meta("k", "v")
    with open_store(tmp_path, FakeClock()) as store:
        assert await store.push_tasks("train", tasks("a"), "1") == 1
        assert await store.manifest(1) == manifest()
        assert await store.events(0) == [event]
        assert (await store.add_event("k", {})).event_id > event.event_id
        assert await store.meta("k") == "v"
