"""Small files that a loss of power has emptied or cut count as absent, and the next writing is whole."""

from __future__ import annotations

import json

import pytest

from palestra.errors import Unauthorized
from palestra_bases.admissions import FILE, Admissions
from palestra_service.jobs.admitting import KEY_FILE, AdmittedJobs
from palestra_service.jobs.launcher import ENDED_FILE, Ended, Ending, read_ended, write_ended
from palestra_service.ray import cluster
from unit.control.building import submit

DAMAGED = [b"", b"\0" * 40, b'{"address": "127', b"[]", b"null", b"\xff\xfe"]


@pytest.fixture(params=DAMAGED, ids=["empty", "zeros", "cut", "list", "null", "binary"])
def damaged(request, caplog):
    yield request.param
    assert [record.levelname for record in caplog.get_records("call")] == ["WARNING"]


def test_what_is_known_of_the_local_cluster(tmp_path, damaged):
    (tmp_path / "ray.json").write_bytes(damaged)
    assert cluster._known(tmp_path) is None


def test_the_token_of_the_local_cluster(tmp_path, damaged, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    (tmp_path / "ray_token").write_bytes(damaged)
    cluster._use_own_token(tmp_path)
    assert len((tmp_path / "ray_token").read_text()) == 64
    assert (tmp_path / "ray_token").stat().st_mode & 0o077 == 0


def test_how_a_server_ended(tmp_path, damaged):
    (tmp_path / ENDED_FILE).write_bytes(damaged)
    assert read_ended(tmp_path) is None
    write_ended(tmp_path, Ended(ending=Ending.COMPLETED))
    assert read_ended(tmp_path) == Ended(ending=Ending.COMPLETED)


async def test_the_key_of_a_job_for_its_base_server(sqlite_store, tmp_path, damaged):
    """An empty file is no empty key."""
    job = await submit(sqlite_store)
    (tmp_path / "jobs" / job.job_id).mkdir(parents=True)
    (tmp_path / "jobs" / job.job_id / KEY_FILE).write_bytes(damaged)
    admitted = AdmittedJobs(tmp_path / "base", tmp_path / "jobs")
    admitted.prepare()
    admitted.find_key(job)
    admitted.write({})
    assert json.loads((tmp_path / "base" / FILE).read_text()) == {}
    with pytest.raises(Unauthorized):
        Admissions(tmp_path / "base" / FILE).of("")


def test_the_admissions_of_a_base_server(tmp_path, caplog):
    (tmp_path / "base").mkdir()
    for content in DAMAGED:
        (tmp_path / "base" / FILE).write_bytes(content)
        AdmittedJobs(tmp_path / "base", tmp_path / "jobs").prepare()
        assert Admissions(tmp_path / "base" / FILE).weights == {}


def test_small_files_are_written_whole(tmp_path, monkeypatch):
    """So that no loss of power empties them."""
    synced = []
    monkeypatch.setattr("palestra.disk.os.fsync", lambda descriptor: synced.append(descriptor))
    cluster._write(tmp_path, {"address": "127.0.0.1:1", "pid": 1, "started": None})
    write_ended(tmp_path, Ended(ending=Ending.LOST))
    assert len(synced) == 4, "each file, and its name"
