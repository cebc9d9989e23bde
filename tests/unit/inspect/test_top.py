"""`palestra top`: numbers of the store in the terminal, and nothing of others that moves its cursor."""

from __future__ import annotations

import sqlite3

import pytest
from rich.live import Live

from palestra.cli.main import main
from palestra_inspect.top_view import sparkline
from unit.dashboard.recorded import record


def test_a_sparkline_rises_with_its_numbers():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 10, 10], 2) == "▁█"
    assert sparkline([3.0, 3.0], 10) == "▅▅"
    assert sparkline([], 10) == ""
    assert len(sparkline(list(range(1000)), 37)) == 37


async def test_once_prints_the_run_its_curves_its_episodes_and_its_calls(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    await record(tmp_path)
    assert main(["top", str(tmp_path), "--once"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "completed" in lines[1]
    assert "5/8" in lines[1]
    assert "0.625" in lines[1]
    assert next(line for line in lines if line.startswith("reward")).split()[1:] == [
        "▁█",
        "0.625",
        "(0.5",
        "to",
        "0.625)",
    ]
    assert "train-000002-01" in text
    assert "slowest calls" in text
    assert "1.00" in text  # seconds of a call


async def test_text_of_others_can_not_move_the_cursor(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    await record(tmp_path)
    hostile = "\x1b]0;pwned\x07\x1b[2J\u202e[bold]x"
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("UPDATE episodes SET task_id = ? WHERE ended_at IS NOT NULL", (hostile,))
        connection.execute("UPDATE chats SET agent = ?", (hostile,))
    assert main(["top", str(tmp_path), "--once"]) == 0
    text = capsys.readouterr().out
    assert "[bold]x" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


async def test_a_damaged_run_says_why_and_the_others_are_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        await record(tmp_path / name)
    (tmp_path / "bad" / "run.db").write_bytes(b"no database" * 1000)
    assert main(["top", str(tmp_path / "good"), str(tmp_path / "bad"), "--once"]) == 0
    text = capsys.readouterr().out
    assert "unreadable" in text
    assert "0.625" in text


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    assert main(["top", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"palestra: {tmp_path} is not the folder of a run (it has no run.db)\n"


async def test_it_draws_again_until_ctrl_c(tmp_path, monkeypatch, capsys):
    await record(tmp_path)
    drawn, looks = [], []
    monkeypatch.setattr(Live, "update", lambda self, view, refresh: drawn.append(view))

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("palestra_inspect.top.time.sleep", sleep)
    assert main(["top", str(tmp_path), "--seconds", "1"]) == 130
    assert (len(drawn), looks) == (3, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("width", [40, 80])
async def test_it_fits_into_a_narrow_terminal(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    await record(tmp_path)
    main(["top", str(tmp_path), "--once"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width
