from __future__ import annotations

import pytest

from palestra.cli.main import main
from palestra_inspect.paragraphs import say_paragraph


@pytest.mark.parametrize("columns", [40, 80, 300])
def test_a_text_is_as_wide_as_the_terminal_up_to_a_width(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    say_paragraph("try       ", "more tasks " * 30)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10] for line in lines] == ["try       ", *[" " * 10] * (len(lines) - 1)]
    assert min(columns, 100) - 10 <= max(map(len, lines)) <= min(columns, 100)
    assert " ".join(line[10:] for line in lines) == ("more tasks " * 30).strip()


def test_a_path_is_never_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    say_paragraph("all       ", "palestra episodes " + "runs/a" * 20)
    assert "runs/a" * 20 in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("command", [["algorithms"], ["algorithms", "dapo"], ["environments"]])
def test_lists_fit_a_terminal_of_80_columns(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    main(command)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15
    assert [line for line in lines if len(line) > 80 and not line.startswith("to train")] == []


def test_in_a_pipe_an_entry_is_one_line(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    main(["algorithms"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dapo")]
    assert line.endswith("penalises length")
