"""Texts beside a label, in lines that fit the terminal."""

from __future__ import annotations

import shutil
import textwrap

from palestra.terminal import one_line, say

WIDEST = 100  # columns: longer lines are hard to read
_NARROWEST = 24  # columns of a text beside a long label


def say_paragraph(label: str, text: str, widest: int = WIDEST) -> None:
    """Write a label and a text beside it: as wide as the terminal, at most `widest` columns; in a pipe `widest`."""
    width = min(widest, shutil.get_terminal_size((widest, 0)).columns)
    lines = textwrap.wrap(
        one_line(text), max(width - len(label), _NARROWEST), break_on_hyphens=False, break_long_words=False
    )
    for number, line in enumerate(lines or [""]):
        say(f"{label if not number else '':<{len(label)}}{line}")
