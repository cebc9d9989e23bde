"""A terminal's output as text: no escape sequence survives, and memory does not grow with the output."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra_screens.terminal.shell import Output, plain_text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r0m\x1b\\x", "x"),
        ("\x1b(Bplain\x1b=", "plain"),
        ("10%\r50%\r100%\r\ndone\r\n", "100%\ndone\n"),
        ("abc\b\bxy", "axy"),
        ("\x1b]52;c;never ended", ""),
        ("bell\x07", "bell␇"),
        ("tab\there", "tab\there"),
    ],
)
def test_what_stays(written, text):
    assert plain_text(written) == text


@pytest.mark.slow
@given(st.text(alphabet="\x1b[]0;m\x07\\\r\n\bPab\x9b\u202e", max_size=60))
def test_no_control_character_stays(written):
    assert not set(plain_text(written)) & set("\x1b\x07\r\b\x9b\u202e")


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_the_beginning_and_the_end_are_kept(chunks):
    output, whole = Output(20), b"".join(chunks)
    for chunk in chunks:
        output.add(chunk)
    text = output.take()
    if len(whole) <= 40:
        assert text == plain_text(whole.decode(errors="replace"))
    else:
        missing = f"… ({len(whole) - 40:,} bytes are left out) …"
        first, last = (plain_text(part.decode(errors="replace")) for part in (whole[:20], whole[-20:]))
        assert text == f"{first}\n{missing}\n{last}"
    assert output.take() == ""


def test_many_backspaces_take_no_more_time_than_as_many_letters():
    began = time.process_time()
    assert plain_text("a" * 100_000 + "\b" * 100_000 + "b") == "b"
    assert time.process_time() - began < 1
