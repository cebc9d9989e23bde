"""Tasks with an answer: drawn from a seed, for training or validation, and the part of a reply that is its answer."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from typing import Any, Literal

from palestra.errors import ConfigError

Split = Literal["train", "validation"]
_MAX_REPEATS = 2000  # draws in a row without a new task after which the split counts as exhausted


def split_of(key: str) -> Split:
    """Return the split of a task, by a hash of its key: a quarter is for validation.

    The split does not depend on the seed, so a job with another seed validates on no task that this one was trained on.
    """
    return "validation" if hashlib.sha256(key.encode()).digest()[0] < 64 else "train"


def draw_tasks(
    split: Split, count: int, seed: int, draw: Callable[[random.Random], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Draw distinct tasks of a split; equal arguments give equal tasks. `draw`: creates a task; its `id` identifies it
    and decides its split.
    """
    if split not in ("train", "validation"):
        raise ConfigError(f"the splits are train and validation; there is no {split!r}")
    source = random.Random(f"{split} {seed}")
    found: dict[str, dict[str, Any]] = {}
    repeats = 0
    while len(found) < count:
        task = draw(source)
        name = str(task["id"])
        if split_of(name) == split and name not in found:
            found[name] = task
            repeats = 0
        elif (repeats := repeats + 1) > _MAX_REPEATS:
            raise ConfigError(f"there are about {len(found)} {split} tasks, and {count} were asked for")
    return list(found.values())


def seed_tasks(name: str, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw tasks that consist of a seed, from which the environment creates its world: keys `id` and `seed`.

    Two seeds may give the same world: in a game with few beginnings, such as the deals of a small deck, the splits
    share most worlds.
    """

    def draw(source: random.Random) -> dict[str, Any]:
        number = source.randrange(2**31)
        return {"id": f"{name}-{number}", "seed": number}

    return draw_tasks(split, count, seed, draw)


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
