"""`palestra dashboard`: what it can't show is one line."""

from __future__ import annotations

import asyncio
import socket

from palestra.cli.main import main
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


async def _recorded(folder) -> None:
    await record(folder)
