"""`palestra dashboard`: what it can't show is one line."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import webbrowser
from pathlib import Path

import pytest

from palestra.cli.main import main
from palestra.dashboard.progress import describe_run
from palestra.dashboard.runs import runs_of
from palestra_inspect import dashboard
from unit.dashboard.recorded import record


def said(capsys) -> str:
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    assert main(["dashboard", str(tmp_path), "--no-browser"]) == 2
    assert "not the folder of a run" in said(capsys)


def test_a_port_in_use_is_one_line(tmp_path, capsys):
    asyncio.run(_recorded(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["dashboard", str(tmp_path), "--no-browser", "--port", str(port)]) == 2
    assert f"{port} can't be listened on" in said(capsys)


@pytest.mark.parametrize("version", [99, 1])
def test_a_run_of_another_version_is_one_line_and_the_others_are_there(tmp_path, version):
    for name in ("good", "other"):
        (tmp_path / name).mkdir()
        asyncio.run(_recorded(tmp_path / name))
    with sqlite3.connect(tmp_path / "other" / "run.db") as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    good, other = (describe_run(run) for run in runs_of([tmp_path / "good", tmp_path / "other"]))
    assert (good.state, other.state) == ("completed", "unreadable")
    assert f"{version:08x}" in (other.reason or "")
    assert "\n" not in (other.reason or "")


@pytest.mark.parametrize("failure", [None, webbrowser.Error("no runnable browser")])
def test_a_machine_without_a_browser_is_one_line(tmp_path, monkeypatch, capsys, failure):
    def no_browser(link):
        if failure is not None:
            raise failure
        return False

    monkeypatch.setattr(webbrowser, "open", no_browser)
    dashboard._open("http://127.0.0.1:1/dashboard#once-1", tmp_path)
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert text.startswith("no browser could be started here; open the link")


def test_the_browsers_command_does_not_show_the_code(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: not opened.append(address))
    dashboard._open("http://127.0.0.1:1/dashboard#once-1", tmp_path)
    (address,) = opened
    assert "once-" not in address
    assert 'content="0; url=http://127.0.0.1:1/dashboard#once-1"' in Path(address.removeprefix("file://")).read_text()


async def _recorded(folder) -> None:
    await record(folder)
