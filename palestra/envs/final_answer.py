"""The part of a reply that is its answer, where working may stand before it."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```[^\n`]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_OPENING = {"]": "[", "}": "{"}


def final_answers(reply: str, lines: int) -> list[str]:
    """Return what may be the answer of a reply: one text, or two where the answer has several lines.

    It is what the last `<answer>` tags enclose; else the code block that ends the reply; else its last line, or the
    lines of the JSON value that ends with it. Of an answer of several lines it is as many last lines as the expected
    answer has, or the last paragraph.
    """
    for found in (_TAGGED.findall(reply), _FENCED.findall(reply)):
        if found:
            return [found[-1].strip()]
    said = reply.strip().split("\n")
    if lines > 1:
        return ["\n".join(said[-lines:]), re.split(r"\n[ \t]*\n", reply.strip())[-1]]
    return ["\n".join(said[_start_of_value(said) :]).strip()]


def _start_of_value(lines: list[str]) -> int:
    """Return the line that opens the JSON value which ends with the last line, or the last line."""
    last = len(lines) - 1
    closing = lines[last][-1:]
    if closing not in _OPENING:
        return last
    depth = 0
    for place in range(last, -1, -1):
        depth += lines[place].count(closing) - lines[place].count(_OPENING[closing])
        if depth <= 0:
            return place if lines[place].lstrip().startswith(_OPENING[closing]) else last
    return last
