"""Reasoning in front of an answer, between `<think>` and `</think>`."""

from __future__ import annotations

import re

_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)


def write_thought(reasoning: str) -> str:
    """What stands before the answer."""
    return f"<think>\n{reasoning}\n</think>\n\n"


def read_thought(text: str) -> tuple[str | None, str]:
    """A reply's reasoning (None: it has none) and the rest. Reasoning that was cut off leaves no rest."""
    match = _THOUGHT.match(text)
    if match is None:
        return None, text
    return match[1].strip("\n") or None, text[match.end() :].lstrip("\n")
