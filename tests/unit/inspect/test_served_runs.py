"""`palestra episodes` and `palestra top` of a run at a server: what they show of its folder, with the client alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from palestra.cli.main import main
from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.routes import create_page_app
from palestra.http.server import listen, served, url_of
from unit.dashboard.recorded import record

pytestmark = pytest.mark.ci

# What `pip install palestra` does not bring.
MISSING = ("torch", "transformers", "ray", "numpy", "sqlalchemy", "fastapi", "starlette", "uvicorn", "openai", "PIL")
LIGHT = (
    f"import sys; sys.modules.update(dict.fromkeys({MISSING!r})); "
    "from palestra.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


@contextlib.asynccontextmanager
async def at_a_server(folder, monkeypatch) -> AsyncIterator[str]:
    """Serve a recorded run, as its job does; give the server's URL."""
    access, stopping, listener = OneTimeLink(), asyncio.Event(), listen("127.0.0.1", 0)
    monkeypatch.setenv("PALESTRA_API_KEY", access._key)
    monkeypatch.setenv("COLUMNS", "160")
    async with served(create_page_app([await record(folder)], access, stopping), listener, stopping.set):
        yield url_of(listener)


async def said(capsys, *words: object) -> str:
    assert await asyncio.to_thread(main, list(map(str, words))) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("--kind", "train"), ("--state", "completed", "--limit", "2"), ("--claimed",)])
async def test_the_list_is_that_of_the_folder(tmp_path, monkeypatch, capsys, words):
    async with at_a_server(tmp_path, monkeypatch) as url:
        assert await said(capsys, "episodes", url, *words) == await said(capsys, "episodes", tmp_path, *words)


async def test_programs_read_the_same_of_both(tmp_path, monkeypatch, capsys):
    async with at_a_server(tmp_path, monkeypatch) as url:
        monkeypatch.setattr("palestra_inspect.served_run.PAGE", 2)
        both = [await said(capsys, "episodes", run, "--json") for run in (url, tmp_path)]
        assert sorted(both[0].splitlines()) == sorted(both[1].splitlines())
        assert len(both[0].splitlines()) == 10
        names = ("episodes", "train-000000-01", "--json")
        one, other = [json.loads(await said(capsys, names[0], run, *names[1:])) for run in (url, tmp_path)]
        assert (one | {"run": ""}) == (other | {"run": ""})


async def test_one_episode_has_its_messages_and_why_it_was_trained(tmp_path, monkeypatch, capsys):
    async with at_a_server(tmp_path, monkeypatch) as url:
        for how in ((), ("--unfold",), ("--text",)):
            names = ("episodes", "train-000000-01", *how)
            text, other = [await said(capsys, names[0], run, *names[1:]) for run in (url, tmp_path)]
            assert text == other
            of_it = ("train-000000-01", "trained in step 5", "edited message", "row 1")
            parts = ("go on", "<b>B&C</b>") if how == ("--text",) else of_it
            assert all(part in text for part in ("reward 1", *parts))
        assert await asyncio.to_thread(main, ["episodes", url, "train-999999-00"]) == 2
        assert "train-999999-00" in capsys.readouterr().err


async def test_top_shows_the_run_its_curves_its_episodes_and_its_calls(tmp_path, monkeypatch, capsys):
    async with at_a_server(tmp_path, monkeypatch) as url:
        text = await said(capsys, "top", url, "--once")
        for part in ("recorded", "5/8", "0.625", "train-000002-02", "slowest calls"):
            assert part in text
        alone = await said(capsys, "top", tmp_path, "--once")
        assert text.splitlines()[4:] == alone.splitlines()[4:]
        # a run of this machine and one at a server, in one table
        both = await said(capsys, "top", url, tmp_path, "--once")
        assert both.count("5/8") == 2


async def test_the_client_alone_lists_and_shows_it(tmp_path, monkeypatch):
    async with at_a_server(tmp_path, monkeypatch) as url:
        for words in (["episodes", url], ["episodes", url, "train-000002-02"], ["top", url, "--once"]):
            command = [sys.executable, "-c", LIGHT, *words]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
            assert "train-000002-02" in done.stdout


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_without_its_key_it_is_one_line(tmp_path, monkeypatch, capsys, key):
    async with at_a_server(tmp_path, monkeypatch) as url:
        if key is None:
            monkeypatch.delenv("PALESTRA_API_KEY")
        else:
            monkeypatch.setenv("PALESTRA_API_KEY", key)
        assert await asyncio.to_thread(main, ["episodes", url]) == 2
    assert capsys.readouterr().err.count("\n") == 1
