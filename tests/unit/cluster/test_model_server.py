from __future__ import annotations

import pytest

from palestra.cluster import model_server
from palestra.cluster.model_server import ModelServer
from palestra.errors import PalestraError
from palestra.scheduler.launcher import ENDED_FILE, LOG_FILE, Ended, Ending, read_ended, write_ended

GAMES = {
    "steps": 1,
    "engine": {"kind": "scripted", "scripted_tokens": 3},
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


async def test_how_a_server_ended_is_left_in_the_folder_until_it_is_started_again(server, tmp_path):
    write_ended(tmp_path, Ended(ending=Ending.STOPPED))
    await server.start(GAMES, str(tmp_path), "127.0.0.1")
    ended = await server.ended()
    assert ended == Ended(ending=Ending.COMPLETED) == read_ended(tmp_path)


async def test_a_model_is_served_until_it_is_stopped_and_that_is_no_completion(server, tmp_path):
    url = await server.start({"kind": "inference", "engine": {"kind": "scripted"}}, str(tmp_path), "127.0.0.1")
    assert url == await server.address()
    await server.stop()
    assert await server.ended() == Ended(ending=Ending.STOPPED) == read_ended(tmp_path)
    log = (tmp_path / LOG_FILE).read_text()
    assert "serving SmolLM2-135M-Instruct" in log
    assert "served 0 calls" in log


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ending": "unheard of", "reason": ""}'])
def test_what_is_no_ending_is_none(tmp_path, text):
    (tmp_path / ENDED_FILE).write_text(text)
    assert read_ended(tmp_path) is None
