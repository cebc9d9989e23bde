from __future__ import annotations

import asyncio

import pytest

from palestra.errors import Conflict
from palestra.types.records import Task
from unit.building import FakeClock, open_store


def tasks(*names: str, **data) -> list[Task]:
    return [Task(task_id=name, data={"name": name} | data) for name in names]


async def test_tasks_keep_their_order_over_chunks(store):
    assert await store.tasks.push("train", tasks("b", "a"), "1") == 2
    assert await store.tasks.push("train", tasks("d", "c"), "2") == 4
    assert [t.task_id for t in list(await store.tasks.stored("train"))] == ["b", "a", "d", "c"]
    assert (await store.tasks.stored("train"))[0].data == {"name": "b"}


async def test_the_same_chunk_again_is_a_no_op_and_another_under_its_name_a_conflict(store):
    for _ in range(3):
        assert await store.tasks.push("train", tasks("a", "b"), "1") == 2
    for other in (tasks("a"), tasks("b", "a"), tasks("a", "b", more=1), []):
        with pytest.raises(Conflict, match="'1'"):
            await store.tasks.push("train", other, "1")
    assert len(await store.tasks.stored("train")) == 2


async def test_a_task_that_is_known_is_not_added_again(store):
    await store.tasks.push("train", tasks("a", "a"), "1")
    assert await store.tasks.push("train", tasks("b", "a"), "2") == 2
    assert [t.task_id for t in list(await store.tasks.stored("train"))] == ["a", "b"]


async def test_a_task_id_stands_for_one_thing_and_a_refused_chunk_leaves_nothing(store):
    await store.tasks.push("train", tasks("a"), "1")
    with pytest.raises(Conflict, match="'a'"):
        await store.tasks.push("train", [*tasks("new"), *tasks("a", other=1)], "2")
    with pytest.raises(Conflict, match="'x'"):
        await store.tasks.push("train", [*tasks("x"), *tasks("x", other=1)], "3")
    assert [t.task_id for t in list(await store.tasks.stored("train"))] == ["a"]
    assert await store.tasks.push("train", tasks("new"), "2") == 2  # the name of the chunk is still free


@pytest.mark.parametrize(("split", "name"), [("train", "7"), ("train/sums", "sums/7")])
async def test_an_id_of_a_data_set_need_not_be_unique(split, name, store):
    rows = [Task(task_id=name, data={"id": 7, "q": q}) for q in ("a", "b", "a", "c")]
    assert await store.tasks.push(split, rows, "1") == 3
    assert await store.tasks.push(split, rows[1:], "2") == 3
    found = list(await store.tasks.stored(split))
    assert [task.data for task in found] == [{"id": 7, "q": q} for q in "abc"]
    names = [task.task_id for task in found]
    assert names[0] == name
    assert all(other.startswith(f"{name}-") for other in names[1:])
    assert len(set(names)) == 3


async def test_the_splits_are_apart(store):
    await store.tasks.push("train", tasks("a"), "1")
    assert await store.tasks.push("validation", tasks("a", held_out=True), "1") == 1
    assert [t.data for t in list(await store.tasks.stored("validation"))] == [{"name": "a", "held_out": True}]


async def test_after_sealing_only_what_was_there_is_taken(store):
    await store.tasks.push("train", tasks("a"), "1")
    assert not await store.tasks.sealed()
    await store.tasks.seal()
    await store.tasks.seal()
    assert await store.tasks.sealed()
    assert await store.tasks.push("train", tasks("a"), "1") == 1
    with pytest.raises(Conflict, match="more tasks"):
        await store.tasks.push("train", tasks("b"), "2")


async def test_a_large_chunk_with_repetitions(store):
    many = tasks(*(f"t{i % 1700}" for i in range(2500)))
    assert await store.tasks.push("train", many[:1000], "1") == 1000
    assert await store.tasks.push("train", many, "2") == 1700


async def test_who_waits_for_the_last_task_is_woken_by_it(store):
    waiting = asyncio.ensure_future(store.tasks.wait_sealed())
    await store.tasks.push("train", tasks("a"), "1")
    assert not waiting.done()
    await store.tasks.seal()
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(store.tasks.wait_sealed(), 1)


async def test_tasks_are_there_after_a_restart(tmp_path):
    with open_store(tmp_path, FakeClock()) as store:
        await store.tasks.push("train", tasks("a"), "1")
        await store.tasks.seal()
    with open_store(tmp_path, FakeClock()) as store:
        assert await store.tasks.push("train", tasks("a"), "1") == 1
        assert await store.tasks.sealed()
