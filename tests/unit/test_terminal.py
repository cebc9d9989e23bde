from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from palestra.terminal import LogFormatter, TerminalConsole, one_line, printable, say

HOSTILE = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eevil\x7f\r\x08\ud800\x00"
FORBIDDEN = {
    *map(chr, range(32)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
}


@given(st.text(st.characters(), max_size=50))
def test_no_control_character_but_newline_and_tab_is_left_and_all_else_stays(text):
    shown = printable(text)
    assert not (FORBIDDEN - {"\n", "\t"}) & set(shown)
    shown.encode()
    assert printable(shown) == shown
    assert "\n" not in one_line(text)
    if not (FORBIDDEN - {"\n", "\t"}) & set(text) and text.isascii():
        assert shown == text


def test_what_was_there_is_seen():
    assert printable("\x1b[2J\tone\r\ntwo\x7f\x9b") == "␛[2J\tone\ntwo␡\ufffd"
    assert one_line("a\n palestra: all is well\x1b") == "a palestra: all is well␛"


@pytest.mark.parametrize(
    "hidden", ["\u200b", "\ufeff", "\u200f", "\u061c", "\u00ad", "\u2060", "\u3164", "\U000e0041", "\U000e0100"]
)
def test_text_can_not_hide_in_characters_without_width_nor_turn_its_line(hidden):
    assert printable(f"a{hidden}b") == "a\ufffdb"
    assert printable("किसी‌को 👩‍🚀 ❤️") == "किसी‌को 👩‍🚀 ❤️", "joiners and variants of emoji stay"


def test_a_line_a_log_and_a_console_show_what_they_would_obey():
    out = io.StringIO()
    say(HOSTILE, file=out)
    record = logging.LogRecord("palestra", logging.ERROR, "", 0, "said %s", (HOSTILE,), None)
    out.write(LogFormatter("%(message)s").format(record))
    console = TerminalConsole(file=out, force_terminal=False)
    console.print(HOSTILE, markup=False)
    table = Table("name")
    table.add_row(HOSTILE)
    console.print(table)
    assert not (FORBIDDEN - {"\n"}) & set(out.getvalue())
    assert out.getvalue().count("pwned") == 4


def test_styles_of_our_own_work():
    out = io.StringIO()
    TerminalConsole(file=out, force_terminal=True, color_system="standard").print(Text("x", style="bold"))
    assert out.getvalue() == "\x1b[1mx\x1b[0m\n"


@pytest.mark.parametrize("text", ["[red]a[/]", "[/]", "a[bold", ":smile:", "[link=x]y[/link]", "\\[b]", "[b\\"])
def test_markup_in_text_of_others_is_shown(text):
    out = io.StringIO()
    console, table = TerminalConsole(file=out, width=80, force_terminal=True, color_system="standard"), Table(box=None)
    table.add_column(text)
    table.add_row(text)
    for shown in (text, table, Text.assemble((text, "bold"))):
        console.print(shown)
    assert out.getvalue().count(text) == 4


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_terminal_that_is_not_utf_8_gets_what_it_can_show(encoding):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    say("job → runs/東京 … ä", file=out)
    console = TerminalConsole(file=out, width=80)
    console.print("job → runs/東京 … ä")
    console.print(Table("東京", "→"))
    out.flush()
    lines = out.buffer.getvalue().decode(encoding).splitlines()
    expected = {"ascii": "job > runs/?? ~ ?", "latin-1": "job > runs/?? ~ ä", "cp1252": "job > runs/?? ~ ä"}
    assert lines[:2] == [expected.get(encoding, "job → runs/東京 … ä")] * 2
