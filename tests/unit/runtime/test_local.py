from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from palestra.client.task_files import TaskFile
from palestra.config import JobConfig, dump_saved_config
from palestra.errors import ConfigError, RunInUse, StoreError
from palestra.runtime import run_dir
from palestra.runtime.local import local_job
from palestra.runtime.run_dir import resolve_run_dir, starting_in
from palestra.runtime.tasks import task_of
from palestra.store import Episodes
from palestra.types.states import EpisodeState
from unit.building import TASK


def run_in(folder) -> None:
    folder.mkdir(parents=True)
    (folder / "run.db").write_bytes(b"")


def test_a_new_run_gets_the_next_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(resolve_run_dir(JobConfig(name="x"), False).folder) == "runs/x"
    run_in(tmp_path / "runs" / "x")
    assert str(resolve_run_dir(JobConfig(name="x"), False).folder) == "runs/x-2"
    run_in(tmp_path / "runs" / "x-2")
    assert str(resolve_run_dir(JobConfig(name="x"), False).folder) == "runs/x-3"


def test_serving_again_goes_on_in_the_same_folder_with_the_same_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    serves = JobConfig(name="x", kind="inference")
    run_in(tmp_path / "runs" / "x")  # has trained
    run_in(tmp_path / "runs" / "x-2")
    (tmp_path / "runs" / "x-2" / "config.toml").write_text(dump_saved_config(serves))
    assert str(resolve_run_dir(serves, False).folder) == "runs/x-2"
    named = serves.model_copy(update={"run_dir": tmp_path / "runs" / "x-2"})
    assert resolve_run_dir(named, False).folder == tmp_path / "runs" / "x-2"
    assert str(resolve_run_dir(JobConfig(name="x"), False).folder) == "runs/x-3"
    with starting_in(tmp_path / "runs" / "x-2") as start:  # another process serves from there now
        start.succeeded = True
        assert str(resolve_run_dir(serves, False).folder) == "runs/x-3"


def test_going_on_takes_the_newest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run"):
        resolve_run_dir(JobConfig(name="x"), True)
    run_in(tmp_path / "runs" / "x")
    run_in(tmp_path / "runs" / "x-2")
    assert str(resolve_run_dir(JobConfig(name="x"), True).folder) == "runs/x-2"


def test_a_folder_that_was_named_is_never_used_twice_by_mistake(tmp_path):
    config = JobConfig(run_dir=tmp_path / "r")
    assert resolve_run_dir(config, False).folder == tmp_path / "r"
    with pytest.raises(ConfigError, match=r"--resume.*out"):
        resolve_run_dir(config, True)
    run_in(tmp_path / "r")
    assert resolve_run_dir(config, True).folder == tmp_path / "r"
    with pytest.raises(ConfigError, match="add --resume"):
        resolve_run_dir(config, False)


def test_a_start_that_fails_removes_no_run_that_another_process_made_before_it_got_the_lock(tmp_path, monkeypatch):
    folder, lock = tmp_path / "runs" / "x", run_dir._locked

    def late(folder):
        run_in(folder)
        return lock(folder)

    monkeypatch.setattr(run_dir, "_locked", late)
    with pytest.raises(ZeroDivisionError), run_dir.starting_in(folder):
        raise ZeroDivisionError
    assert (folder / "run.db").exists()


def test_a_start_that_fails_leaves_no_folder_behind(tmp_path):
    with run_dir.starting_in(tmp_path / "runs" / "x"):
        (tmp_path / "runs" / "x" / "run.db").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_keeps_others_out_until_it_has_removed_all_that_it_made(tmp_path, monkeypatch):
    removed, unlink = [], Path.unlink

    def watched(path, missing_ok=False):
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    with run_dir.starting_in(tmp_path / "runs" / "x"):
        (tmp_path / "runs" / "x" / "run.db").touch()
    assert "run.db" in removed
    assert removed[-1] == ".lock"


def test_a_second_process_is_refused_although_the_lock_was_deleted(tmp_path):
    with run_dir.starting_in(tmp_path) as start:
        start.succeeded = True
        (tmp_path / ".lock").unlink()
        for _ in range(2):
            with pytest.raises(RunInUse), run_dir.starting_in(tmp_path):
                pass
    with run_dir.starting_in(tmp_path):
        pass


def test_a_folder_below_one_that_was_deleted_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with (
        pytest.raises(ConfigError, match=r"runs/x.*run's"),
        run_dir.starting_in(Path("runs/x")),
    ):
        pass


def test_tasks_are_read_one_a_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": 7, "q": "é"}\n\n  \n{"q": 2}\n{"id": null, "q": 3}', encoding="utf-8")
    tasks = [task_of(row) for row in TaskFile(path)]
    assert [t.data for t in tasks] == [{"id": 7, "q": "é"}, {"q": 2}, {"id": None, "q": 3}]
    assert tasks[0].task_id == "7"
    assert len({t.task_id for t in tasks}) == 3


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"3",
        b'{"x": NaN}',
        b'{"x": 1e999}',
        b'{"x": 100000000000000000000000}',
        b'{"x": "\\ud800"}',
        b'{"\xff": 1}',
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"q": 1}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:2: ") as caught:
        TaskFile(path).count()
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        TaskFile(tmp_path / "none.jsonl").count()


@pytest.mark.slow
async def test_leases_run_out_again_when_the_store_answers_again(tmp_path, monkeypatch, caplog):
    config = JobConfig.model_validate(
        {"run_dir": tmp_path, "server": {"port": 0}, "engine": {"kind": "fake"}, "rollout": {"lease_seconds": 0.2}}
    )
    failures, expire = ["the disk is full", "the disk is full", "no such table"], Episodes.expire_leases

    async def broken(self):
        if failures:
            raise StoreError(failures.pop(0))
        return await expire(self)

    monkeypatch.setattr(Episodes, "expire_leases", broken)
    async with local_job(config, lambda kind, data: None) as job, asyncio.timeout(60):
        store = job.plane.store
        await store.groups.register("train", 0, 1, TASK, 1)
        claim = await store.episodes.claim("worker", "r", None)
        while (await store.episodes.get(claim.episode_id)).state is EpisodeState.CLAIMED:
            await asyncio.sleep(0.05)
    assert failures == []
    told = [record.getMessage() for record in caplog.records if record.name == "palestra"]
    assert told == [
        "leases can't be looked after now: StoreError: the disk is full",
        "leases can't be looked after now: StoreError: no such table",
    ]
