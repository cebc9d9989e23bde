from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil

import pytest

from palestra import disk
from palestra.errors import CheckpointError, VersionQuarantined
from palestra.trainer import checkpoint
from palestra.trainer.quarantine import Quarantine, read_quarantine, write_quarantine


def fill(content: bytes = b"weights"):
    def run(folder) -> None:
        (folder / "a.bin").write_bytes(content)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.bin").write_bytes(content * 2)

    return run


def write(folder, step: int, keep: int = 9, **kw):
    return checkpoint.write(
        folder, step, kw.get("fill", fill(b"%d" % step)), {"step": step, "note": "été"} | kw.get("state", {}), keep
    )


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_checkpoint_comes_back_with_its_state(tmp_path):
    path = write(tmp_path, 7)
    assert path == tmp_path / "step-000007"
    assert checkpoint.newest_good(tmp_path) == (path, {"step": 7, "note": "été"})
    assert (path / "sub" / "b.bin").read_bytes() == b"77"
    assert names(tmp_path) == ["step-000007"]


def test_every_file_has_its_hash(tmp_path):
    path = write(tmp_path, 1)
    files = json.loads((path / "checkpoint.json").read_text())["files"]
    assert files == {
        "a.bin": hashlib.sha256(b"1").hexdigest(),
        "sub/b.bin": hashlib.sha256(b"11").hexdigest(),
    }


def test_where_there_is_none_there_is_none(tmp_path):
    assert checkpoint.newest_good(tmp_path) is None
    assert checkpoint.newest_good(tmp_path / "not there") is None


def test_the_newest_is_taken_by_step_not_by_time(tmp_path):
    for step in (9, 100, 20):
        write(tmp_path, step)
    path, _ = checkpoint.newest_good(tmp_path)
    assert path.name == "step-000100"


@pytest.mark.parametrize("steps", [(999_999, 1_000_000)])
def test_also_past_a_million_steps(tmp_path, steps):
    for step in steps:
        write(tmp_path, step)
    path, _ = checkpoint.newest_good(tmp_path)
    assert path.name == "step-1000000"


def test_only_so_many_are_kept(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000004", "step-000005"]


def test_the_same_step_again_replaces_the_older_one(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 1, fill=fill(b"new"))
    path, _ = checkpoint.newest_good(tmp_path)
    assert (path / "a.bin").read_bytes() == b"new"
    assert names(tmp_path) == ["step-000001"]


def damage(path, how: str) -> None:
    if how == "flip":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "gone"])
@pytest.mark.parametrize("file", ["a.bin", "sub/b.bin", "checkpoint.json"])
def test_a_damaged_one_gives_way_to_the_one_before_with_a_warning(tmp_path, caplog, file, how):
    write(tmp_path, 1)
    damage(write(tmp_path, 2) / file, how)
    with caplog.at_level(logging.WARNING):
        path, state = checkpoint.newest_good(tmp_path)
    assert (path.name, state["step"]) == ("step-000001", 1)
    assert "step-000002 is damaged" in caplog.text


def test_no_byte_of_it_can_change_unnoticed(tmp_path):
    """Also not one of the state, which says which step was trained last."""
    write(tmp_path, 1)
    path = write(tmp_path, 20)
    for file in ("a.bin", "checkpoint.json"):
        whole = (path / file).read_bytes()
        for place in range(len(whole)):
            for mask in (1, 0x10):
                content = bytearray(whole)
                content[place] ^= mask
                (path / file).write_bytes(bytes(content))
                found, state = checkpoint.newest_good(tmp_path)
                if found.name == "step-000020":  # what does not change what is read, as a space, may pass
                    assert state == {"step": 20, "note": "été"}
                    assert json.loads(bytes(content)) == json.loads(whole)
        (path / file).write_bytes(whole)
    assert checkpoint.newest_good(tmp_path)[0] == path


@pytest.mark.parametrize("index", [b"[]", b"{}", b'{"files": [], "state": {}}', b'{"files": {}}', b"null", b"\xff"])
def test_an_index_of_another_shape_is_damage(tmp_path, index):
    write(tmp_path, 1)
    (write(tmp_path, 2) / "checkpoint.json").write_bytes(index)
    assert checkpoint.newest_good(tmp_path)[0].name == "step-000001"


def test_where_all_are_damaged_it_says_so(tmp_path):
    for step in (1, 2):
        damage(write(tmp_path, step) / "a.bin", "flip")
    with pytest.raises(CheckpointError, match="every checkpoint"):
        checkpoint.newest_good(tmp_path)


def test_what_a_kill_in_the_middle_left_is_ignored_and_then_replaced(tmp_path):
    write(tmp_path, 1)
    left = tmp_path / ".writing-000002"
    left.mkdir()
    (left / "a.bin").write_bytes(b"half")
    (left / "stale").write_bytes(b"x")
    assert checkpoint.newest_good(tmp_path)[0].name == "step-000001"
    path = write(tmp_path, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert names(path) == ["a.bin", "checkpoint.json", "sub"]


def test_a_failure_while_writing_leaves_what_was_there(tmp_path):
    def full(folder) -> None:
        (folder / "a.bin").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    write(tmp_path, 1)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="space left"):
            write(tmp_path, step, fill=full)
    assert names(tmp_path) == ["step-000001"]
    assert checkpoint.newest_good(tmp_path)[1]["step"] == 1


def test_a_folder_that_can_not_be_written_to_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="step 3"):
        write(tmp_path / "file" / "checkpoints", 3)


def test_files_are_on_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    order: list[str] = []
    real_sync, real_rename = os.fsync, type(tmp_path).rename
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), real_sync(fd)))
    monkeypatch.setattr(type(tmp_path), "rename", lambda self, to: (order.append("RENAME"), real_rename(self, to))[1])
    write(tmp_path, 3)
    before, after = order[: order.index("RENAME")], order[order.index("RENAME") + 1 :]
    temporary = str(tmp_path / ".writing-000003")
    assert {f"{temporary}/{f}" for f in ("a.bin", "sub/b.bin", "checkpoint.json")} | {temporary} <= set(before)
    assert after == [str(tmp_path)]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_checkpoint_is_there_until_another_has_its_name(tmp_path, monkeypatch, at_once):
    """What is on the disk before and after each change of a name is copied, as a process that dies leaves it."""
    folder, copies = tmp_path / "c", list()
    write(folder, 3)
    assert checkpoint.read_weights(folder / "step-000003")

    def kept(change):
        def run(*given):
            copies.append(shutil.copytree(folder, tmp_path / f"copy-{len(copies)}"))
            done = change(*given)
            copies.append(shutil.copytree(folder, tmp_path / f"copy-{len(copies)}"))
            return done

        return run

    really = type(tmp_path).rename
    monkeypatch.setattr(disk, "exchange_folders", kept(disk.exchange_folders if at_once else lambda *_: False))
    monkeypatch.setattr(type(tmp_path), "rename", kept(really))
    write(folder, 3, fill=fill(b"new"))
    monkeypatch.undo()
    assert len(copies) == (2 if at_once else 6)
    for copied in copies:
        path, state = checkpoint.good(copied, None)
        assert (path.name, state["step"]) == ("step-000003", 3)
    assert (folder / "step-000003" / "a.bin").read_bytes() == b"new"
    assert names(folder) == ["step-000003"]


def test_damaged_newer_ones_do_not_push_out_the_good_one_that_is_written_after_them(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path, step, keep=3)
    for step in (20, 30):
        damage(tmp_path / f"step-0000{step}" / "a.bin", "flip")
    for step in (15, 16, 17):  # went on from 10
        write(tmp_path, step, keep=3)
        assert checkpoint.newest_good(tmp_path)[1]["step"] == step


# A model of one's own


def with_optimizer(folder) -> None:
    fill()(folder)
    (folder / "optimizer-policy.safetensors").write_bytes(b"moments")


def test_a_linked_model_costs_nothing_and_stays_when_the_checkpoint_is_dropped(tmp_path):
    path = write(tmp_path / "c", 1, fill=with_optimizer)
    checkpoint.link_model(tmp_path / "c", 1, tmp_path / "own")
    assert names(tmp_path / "own") == ["a.bin", "sub"]
    assert os.stat(tmp_path / "own" / "sub" / "b.bin").st_ino == os.stat(path / "sub" / "b.bin").st_ino
    write(tmp_path / "c", 2, keep=1)
    assert not path.exists()
    assert (tmp_path / "own" / "a.bin").read_bytes() == b"weights"
    assert names(tmp_path) == ["c", "own"]


def test_where_nothing_can_be_linked_it_is_copied(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(18, "Invalid cross-device link")

    write(tmp_path / "c", 1)
    monkeypatch.setattr(checkpoint.os, "link", refuse)
    checkpoint.link_model(tmp_path / "c", 1, tmp_path / "own")
    assert (tmp_path / "own" / "sub" / "b.bin").read_bytes() == b"11"


@pytest.mark.parametrize("how", ["gone", "half gone", "damaged"])
def test_a_checkpoint_that_is_not_whole_is_no_model(tmp_path, how):
    if how != "gone":
        path = write(tmp_path / "c", 1)
        (path / "a.bin").unlink() if how == "half gone" else (path / "a.bin").write_bytes(b"other")
    with pytest.raises(CheckpointError, match=r"step 1 is (gone|damaged)"):
        checkpoint.link_model(tmp_path / "c", 1, tmp_path / "own")
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("order", [(999_999, 1_000_000), (1_000_000, 999_999)])
def test_the_newest_is_the_one_of_the_largest_step_and_not_of_the_last_name(tmp_path, order):
    for step in order:
        checkpoint.write(tmp_path, step, lambda path: (path / "w").write_text("w"), {"step": step}, keep=9)
    assert checkpoint.newest_path(tmp_path) == tmp_path / "step-1000000"
    names = ["step-999999", "step-1000000", "step-x", ".writing-2000000", "stepping"]
    assert checkpoint.newest_name(names) == "step-1000000"
    assert checkpoint.newest_name(names[2:]) is None
    (tmp_path / "step-1000000" / "w").write_text("damaged")
    assert checkpoint.newest_path(tmp_path) == tmp_path / "step-999999"
    (tmp_path / "step-999999" / "w").write_text("damaged")
    assert checkpoint.newest_path(tmp_path) is None


def test_the_newest_checkpoint_that_no_audit_holds_back_is_kept(tmp_path):
    for step in range(1, 4):
        write(tmp_path, step, keep=2)
    write_quarantine(tmp_path, Quarantine(since=4, step=5, reason="so"))
    for step in range(4, 8):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["quarantine.json", "step-000003", "step-000006", "step-000007"]


def test_what_an_audit_holds_back_starts_no_other_job(tmp_path):
    for step in (1, 2):
        write(tmp_path / "c", step)
    write_quarantine(tmp_path / "c", Quarantine(since=2, step=3, reason="so"))
    assert checkpoint.not_held(tmp_path / "c") == [tmp_path / "c" / "step-000001"]
    checkpoint.link_model(tmp_path / "c", 1, tmp_path / "one")
    with pytest.raises(VersionQuarantined):
        checkpoint.link_model(tmp_path / "c", 2, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_quarantine_that_cannot_be_read_holds_all_back(tmp_path):
    write_quarantine(tmp_path, held := Quarantine(since=4, step=5, reason="so"))
    assert read_quarantine(tmp_path) == held
    (tmp_path / "quarantine.json").write_text("{}")
    with pytest.raises(CheckpointError):
        read_quarantine(tmp_path)
