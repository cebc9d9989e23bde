"""Tasks of large files: read in chunks, kept in the store, and never in memory as a whole."""

from __future__ import annotations

import json
import sys
import threading
import tracemalloc
from collections import Counter

import pytest

from palestra.client import task_files
from palestra.client.protocol import push_calls
from palestra.client.task_files import TaskFile, read_task_files, task_name
from palestra.config import JobConfig
from palestra.errors import Conflict
from palestra.learner.samplers import Shuffled, TaskPool
from palestra.runtime.arguments import prompt_check
from palestra.runtime.tasks import load_tasks, task_of
from palestra.store import tasks as stored_tasks
from unit.building import FakeClock, open_store


def job(folder, rows) -> JobConfig:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JobConfig.model_validate({"run_dir": folder, "tasks": {"train": folder / "tasks.jsonl"}})


@pytest.mark.slow
async def test_a_hundred_thousand_tasks_take_little_memory_and_a_short_log(tmp_path):
    rows = ({"id": f"t{n}", "question": f"what is {n}? " + "x" * 100} for n in range(100_000))
    config = job(tmp_path, rows)
    size = (tmp_path / "tasks.jsonl").stat().st_size
    with open_store(tmp_path, FakeClock()) as store:
        tracemalloc.start()
        try:
            await load_tasks(store.tasks, config)
            found = await store.tasks.stored("train")
            pool = TaskPool(found, "group_id", 8)
            order = Shuffled(pool, 0)
            assert len({pool[order.position(n)][0].task_id for n in range(1000)}) == 1000
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(found) == len(pool) == 100_000
        assert (found[7].task_id, found[99_999].data["id"]) == ("t7", "t99999")
        assert most < 32 * 2**20, f"{most / 2**20:.0f} MiB"
        assert (tmp_path / "run.db-wal").stat().st_size < 2 * size


async def test_a_task_of_a_file_is_stored_by_few_functions_and_looked_up_only_if_its_id_is_there_twice(
    tmp_path, monkeypatch
):
    count, called, looked_up = 2000, Counter[str](), list[int]()
    absent = stored_tasks._absent
    monkeypatch.setattr(stored_tasks, "_absent", lambda *given: looked_up.append(1) or absent(*given))

    def watch(frame, event, _argument):
        if event == "call" and "palestra" in frame.f_code.co_filename:
            called[frame.f_code.co_name] += 1

    config = job(tmp_path, ({"id": f"t{n}", "prompt": f"what is {n}?"} for n in range(count)))
    threading.setprofile(watch)  # the thread that writes
    sys.setprofile(watch)
    try:
        with open_store(tmp_path, FakeClock()) as store:
            await load_tasks(store.tasks, config, read_task_files(config, prompt_check(lambda task, answer: 1.0)))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    each = {name: calls // count for name, calls in called.items() if calls >= count}
    assert sum(each.values()) <= 7, each
    assert not looked_up
    with open_store(tmp_path / "twice", FakeClock()) as store:
        await load_tasks(store.tasks, job(tmp_path, [{"id": n % 9, "q": n // 18} for n in range(27)]))
        assert [task.data["q"] for task in await store.tasks.stored("train")] == [0] * 9 + [1] * 9
    assert looked_up


@pytest.mark.parametrize("renamed", [False, True])
async def test_of_a_start_that_was_broken_off_between_two_chunks_no_task_is_left(renamed, tmp_path, monkeypatch):
    monkeypatch.setattr(task_files, "BLOCK", 50)  # three lines
    config = job(tmp_path, [{"id": n, "q": "x"} for n in range(10)])
    with open_store(tmp_path, FakeClock()) as store:
        push, pushed = store.tasks.push_texts, []

        async def broken(split, names, texts, chunk):
            if len(pushed) == 2:
                raise KeyboardInterrupt
            pushed.append(len(names))
            return await push(split, names, texts, chunk)

        with monkeypatch.context() as patch:
            patch.setattr(store.tasks, "push_texts", broken)
            with pytest.raises(KeyboardInterrupt):
                await load_tasks(store.tasks, config)
        assert not await store.tasks.sealed()
        assert len(await store.tasks.stored("train")) == 6
        config = job(tmp_path, [{"id": n, "q": "y"} for n in range(2, 10)])
        if renamed:
            file = config.tasks.train.rename(tmp_path / "other.jsonl")
            config = JobConfig.model_validate({"run_dir": tmp_path, "tasks": {"train": file}})
        await load_tasks(store.tasks, config)
        assert [task.data for task in await store.tasks.stored("train")] == [{"id": n, "q": "y"} for n in range(2, 10)]


async def test_a_run_that_has_its_tasks_refuses_others_and_keeps_its_own(tmp_path):
    config = job(tmp_path, [{"id": n} for n in range(3)])
    with open_store(tmp_path, FakeClock()) as store:
        await load_tasks(store.tasks, config)
        with pytest.raises(Conflict):
            await load_tasks(store.tasks, config, read_task_files(job(tmp_path, [{"id": 9}])))
        await load_tasks(store.tasks, config)
        assert [task.task_id for task in await store.tasks.stored("train")] == ["0", "1", "2"]


async def test_groups_of_stored_tasks_are_those_of_tasks_in_memory(tmp_path):
    rows = [{"n": n} | ({} if n % 3 == 0 else {"group_id": n % 5 or None, "é": {"group_id": 1}}) for n in range(40)]
    given = [task_of(row) for row in rows]
    with open_store(tmp_path, FakeClock()) as store:
        await store.tasks.push("train", given, "1")
        stored = await store.tasks.stored("train")
        assert list(stored) == given
        assert stored[-3:] == given[-3:]
        with pytest.raises(IndexError):
            stored[40]
        for key in ("", "group_id", "é", "absent"):
            pools = [TaskPool(each, key, 4) for each in (given, stored)]
            assert list(pools[0]) == list(pools[1])
            assert pools[0].grouped == pools[1].grouped
            names = [f"{group[0].task_id}" for group in pools[0]] + [pools[0][0][-1].task_id, "absent"]
            assert pools[0].entries_of(names) == pools[1].entries_of(names)
            assert set(pools[0].entries_of(names).values()) == set(range(len(pools[0])))


def test_tasks_of_a_file_are_named_as_those_that_are_pushed(tmp_path, monkeypatch):
    rows = [
        {"id": 7, "q": "é\u2028"},
        {"q": [1.5, 1e22, -0.0, None, True]},
        {"id": "", "q": 2**63},
        {"id": 2**70 % 2**64},
    ]
    file = read_task_files(job(tmp_path, rows))["train"]
    assert list(file) == rows
    assert [task for block in file.blocks() for task in block] == rows
    assert [task_of(row).task_id for row in file] == [task_name(row) for row in file]
    monkeypatch.setattr(task_files, "BLOCK", 10)
    assert [len(block) for block in file.blocks()] == [1, 1, 1, 1]


def test_a_file_is_pushed_as_it_is_read(tmp_path):
    job(tmp_path, [{"id": n} for n in range(2500)])
    calls = list(push_calls({"train": TaskFile(tmp_path / "tasks.jsonl")}))
    assert [(len(call.body.tasks), call.body.final) for call in calls] == [(1000, False), (1000, False), (500, True)]
