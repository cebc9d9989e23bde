"""Tables at 80 columns and in pipes: nothing is cut without an ellipsis, and what matters is there."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.terminal import NO_WIDTH, TerminalConsole
from palestra_inspect.top_view import fitted_table

pytestmark = pytest.mark.ci

NAMES = ("job", "name", "kind", "user", "state", "since", "why")
JOB = ("job-1f3a5c7e9b2d4f60", "a-name-of-forty-characters-that-is-long!", "training, private")
WHY = "waits for 4 GPUs of machine big-one, which other jobs hold until about 14:30"
ROW = (*JOB, "someone@example.org", "queued", "28 Nov 10:04", WHY)


def drawn(rows, width: int, is_terminal: bool = True) -> list[str]:
    console = TerminalConsole(file=io.StringIO(), force_terminal=is_terminal, color_system=None)
    if is_terminal:
        console.width = width
    dropped, cut = ("kind", "since", "user"), ("name", "user", "why")
    console.print(fitted_table(NAMES, rows, console.width, (), cut, dropped))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120, 400])
def test_at_any_width_id_and_state_are_whole_and_the_reason_is_readable(width):
    header, line = drawn([ROW], width)
    assert max(map(len, (header, line))) <= width
    assert ROW[0] in line
    assert "queued" in line
    assert "waits for 4 GPUs of ma" in line
    for name in header.split():
        assert name in NAMES
    for name, cell in zip(NAMES, ROW, strict=True):
        if name in header.split():
            at = header.index(f"{name} " if name != "why" else name)
            shown = line[at:].split("  ")[0].rstrip()
            assert shown == cell or (shown.endswith("…") and cell.startswith(shown[:-1])), (name, shown)


def test_a_pipe_has_everything(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    header, line = drawn([ROW], 0, is_terminal=False)
    assert [name for name in NAMES if name in header] == list(NAMES)
    assert all(cell in line for cell in ROW)
    assert TerminalConsole(file=io.StringIO()).width == NO_WIDTH


@given(st.lists(st.tuples(*[st.text(max_size=40)] * len(NAMES)), max_size=3), st.integers(60, 200))
def test_whatever_the_texts_no_line_is_wider_than_the_terminal(rows, width):
    fits = [(row[0][:20], *row[1:4], row[4][:8], row[5][:12], row[6]) for row in rows]
    assert all(len(line) <= width for line in drawn(fits, width))
