from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading

import httpx2
import pytest

from palestra.config import reference_of
from palestra.errors import EngineFailure, ModelError, PalestraError, ServerFailed, StoreError
from palestra.models.catalog import model_folder
from palestra.runtime import starting_points as checkpoints
from palestra.trainer.checkpoint import newest_path
from palestra_service import model_server
from palestra_service.jobs.launcher import ENDED_FILE, LOG_FILE, Ended, Ending, ending_of, read_ended, write_ended
from palestra_service.model_server import ModelServer

GAMES = {
    "steps": 1,
    "engine": {"kind": "fake", "reply_tokens": 3},
    "environment": {"name": "gomoku"},
    "rollout": {"group_size": 2, "groups_per_step": 1},
}


@pytest.fixture
def server(monkeypatch):
    """In a process that is not its own."""
    monkeypatch.setattr(model_server.logging, "basicConfig", lambda **_: None)
    server = ModelServer()
    yield server
    if server._log is not None:
        server._log.close()


async def test_what_nobody_foresaw_at_a_start_is_an_error_in_words_with_the_trace_in_the_log(
    server, tmp_path, monkeypatch
):
    async def broken(self):
        raise ValueError("no such thing")

    monkeypatch.setattr(model_server.JobThread, "start", broken)
    with pytest.raises(PalestraError, match=r"^ValueError: no such thing$"):
        await server.start(GAMES, str(tmp_path), "127.0.0.1")
    assert "Traceback" in (tmp_path / LOG_FILE).read_text()


async def test_a_folder_that_can_not_be_written_is_an_error_in_words(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PalestraError, match="file"):
        await server.start(GAMES, str(tmp_path / "file" / "job"), "127.0.0.1")


@pytest.mark.parametrize("kind", ["training", "inference"])
async def test_models_of_references_are_where_the_service_says(kind, server, tmp_path, monkeypatch):
    found = {}

    def look(config, console, terms):
        found.update(terms.weights)
        raise ModelError("that is enough")

    monkeypatch.setattr(model_server, "JobThread", look)
    tiny, house = map(str, (model_folder("tiny-random"), model_folder("tiny-random-vision")))
    job = {"kind": kind, "model": "tiny-random", "algorithm": {"kl": {"reference": "house"}}}
    with pytest.raises(ModelError, match="enough"):
        await server.start(job, str(tmp_path), "127.0.0.1", {reference_of("policy"): house})
    assert found == {"policy": tiny} | ({reference_of("policy"): house} if kind == "training" else {})


@pytest.mark.slow
async def test_how_a_server_ended_is_left_in_the_folder_until_it_is_started_again(server, tmp_path):
    write_ended(tmp_path, Ended(ending=Ending.STOPPED))
    await server.start(GAMES, str(tmp_path), "127.0.0.1")
    ended = await server.ended()
    assert ended == Ended(ending=Ending.COMPLETED) == read_ended(tmp_path)


@pytest.mark.slow
async def test_a_model_is_served_until_it_is_stopped_and_that_is_no_completion(server, tmp_path):
    url = await server.start({"kind": "inference", "engine": {"kind": "fake"}}, str(tmp_path), "127.0.0.1")
    assert url == await server.address()
    await server.stop()
    assert await server.ended() == Ended(ending=Ending.STOPPED) == read_ended(tmp_path)
    log = (tmp_path / LOG_FILE).read_text()
    assert "serving SmolLM2-135M-Instruct" in log
    assert "served 0 calls" in log


@pytest.mark.slow
async def test_a_server_answers_with_the_estimate_of_its_learner(server, tmp_path):
    assert await server.ping() is None
    steps = 1000
    await server.start(GAMES | {"steps": steps}, str(tmp_path), "127.0.0.1")
    while (estimate := await server.ping()) is None:
        await asyncio.sleep(0.01)
    assert 0 < estimate == pytest.approx(server._thread._job.progress.seconds_left, rel=0.5)
    await server.stop()
    await server.ended()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ending": "unheard of", "reason": ""}'])
def test_what_is_no_ending_is_none(tmp_path, text):
    (tmp_path / ENDED_FILE).write_text(text)
    assert read_ended(tmp_path) is None


@pytest.mark.slow
async def test_a_job_whose_event_loop_is_blocked_does_not_answer_when_it_is_to_stop(server, tmp_path):
    await server.start({"kind": "inference", "engine": {"kind": "fake"}}, str(tmp_path), "127.0.0.1")
    blocked, go = threading.Event(), threading.Event()
    server._thread._loop.call_soon_threadsafe(lambda: (blocked.set(), go.wait(60)))
    assert await asyncio.to_thread(blocked.wait, 60)
    stopping = asyncio.ensure_future(server.stop())
    done, _ = await asyncio.wait({stopping}, timeout=0.5)
    assert not done
    go.set()
    await stopping
    assert (await server.ended()).ending is Ending.STOPPED
    await server.answer()  # also when it is over


async def test_a_model_that_is_no_folder_is_not_looked_for_in_one(server, tmp_path, monkeypatch):
    (tmp_path / "models" / "private").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = {"kind": "inference", "policies": {"policy": {"model": "models/private"}}}
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        await server.start(config, str(tmp_path / "job"), "127.0.0.1")


@pytest.mark.slow
async def test_a_job_answers_while_the_hashes_of_its_checkpoint_are_looked_at(server, tmp_path, monkeypatch):
    """A scheduler that stops it would else take it for stuck, and kill it."""
    looking, go = threading.Event(), threading.Event()

    def slow(folder):
        looking.set()
        assert go.wait(60)
        return newest_path(folder)

    monkeypatch.setattr(checkpoints, "newest_path", slow)
    await server.start(GAMES, str(tmp_path), "127.0.0.1")
    ending = asyncio.ensure_future(server.ended())
    assert await asyncio.to_thread(looking.wait, 60)
    try:
        async with asyncio.timeout(10):
            await server.answer()
    finally:
        go.set()
    assert (await ending).ending is Ending.COMPLETED


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (PalestraError("wrong"), Ending.FAILED),
        (EngineFailure("gone"), Ending.LOST),
        (OSError(errno.ENOSPC, "full"), Ending.LOST),
        (OSError(errno.EMFILE, "files"), Ending.LOST),
        (PermissionError(errno.EACCES, "no"), Ending.FAILED),
        (MemoryError(), Ending.LOST),
        (ValueError("a defect"), Ending.FAILED),
    ],
)
def test_one_rule_says_what_becomes_of_a_job_that_an_error_ends(error, ending):
    assert ending_of(error) is ending
    outer = StoreError("in words")
    outer.__cause__ = error
    assert ending_of(outer) is ending


def test_a_full_disk_of_sqlite_loses_a_job_and_a_damaged_file_fails_it(tmp_path):
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("PRAGMA max_page_count = 3")
    with pytest.raises(sqlite3.OperationalError) as full:
        connection.execute(
            "CREATE TABLE t AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n) "
            "SELECT x FROM n LIMIT 100000"
        )
    connection.close()
    (tmp_path / "b.db").write_bytes(b"no database" * 1000)
    damaged = sqlite3.connect(tmp_path / "b.db")
    with pytest.raises(sqlite3.DatabaseError) as broken:
        damaged.execute("SELECT * FROM t")
    damaged.close()
    assert (ending_of(full.value), ending_of(broken.value)) == (Ending.LOST, Ending.FAILED)
    memory = sqlite3.connect(":memory:")
    with pytest.raises(sqlite3.OperationalError) as garbled:  # Python's own error has no code
        memory.execute("SELECT CAST(x'ff' AS TEXT)").fetchall()
    memory.close()
    assert ending_of(garbled.value) is Ending.FAILED


async def test_a_disk_that_is_full_at_the_start_loses_the_job(server, tmp_path, monkeypatch):
    async def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_server.JobThread, "start", full)
    with pytest.raises(ServerFailed, match="space left"):
        await server.start(GAMES, str(tmp_path), "127.0.0.1")


@pytest.mark.slow
async def test_a_tenants_key_does_not_raise_the_number_of_workers_that_the_service_has_allowed(server, tmp_path):
    config = {"kind": "inference", "engine": {"kind": "fake", "replicas": 2}}
    url = await server.start(config, str(tmp_path), "127.0.0.1")
    headers = {"authorization": f"Bearer {(tmp_path / 'run' / 'api_key').read_text().strip()}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        refused = await http.post("/engine/replicas", json={"replicas": 3})
        assert refused.status_code == 422
        assert "this job was admitted with 2" in refused.json()["error"]["message"]
        for replicas in (1, 2):
            assert (await http.post("/engine/replicas", json={"replicas": replicas})).json() == {"replicas": replicas}
    await server.stop()
    await server.ended()
