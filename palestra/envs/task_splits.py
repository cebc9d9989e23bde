"""Tasks that are drawn from a seed, such that no task is ever in both training and validation."""

from __future__ import annotations

import hashlib
import random
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
    """Draw distinct tasks of a split; equal arguments give equal tasks.

    Args:
        draw: creates a task; its `id` identifies it and decides its split.
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

    Args:
        name: prefix of the ids.
    """

    def draw(source: random.Random) -> dict[str, Any]:
        number = source.randrange(2**31)
        return {"id": f"{name}-{number}", "seed": number}

    return draw_tasks(split, count, seed, draw)
