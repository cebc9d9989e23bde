"""Extracts the answer from a reply that may begin with working."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```[^\n`]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_OPENING = {"]": "[", "}": "{"}


def final_answers(reply: str, lines: int) -> list[str]:
    """Return possible answers of a reply: one text, or two if the answer has several lines.

    The answer is inside the last `<answer>` tags; else the code block that ends the reply; else its last line, or the
    lines of the JSON value that ends with it. For an expected answer of several lines it is that many last lines, or
    the last paragraph.
    """
    for found in (_TAGGED.findall(reply), _FENCED.findall(reply)):
        if found:
            return [found[-1].strip()]
    said = reply.strip().split("\n")
    if lines > 1:
        return ["\n".join(said[-lines:]), re.split(r"\n[ \t]*\n", reply.strip())[-1]]
    return ["\n".join(said[_start_of_value(said) :]).strip()]


def _start_of_value(lines: list[str]) -> int:
    """Return the first line of the JSON value that ends with the last line, or the last line."""
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
