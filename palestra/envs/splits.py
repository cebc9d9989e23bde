"""Tasks that are drawn by a seed, and never in training and in validation both."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, Literal

from palestra.errors import ConfigError

Split = Literal["train", "validation"]
_MAX_REPEATS = 2000  # draws in a row that bring nothing new, until there is taken to be nothing


def split_of(key: str) -> Split:
    """Which split a task belongs to, whatever the seed: one of four, by a hash of its key, is for validation."""
    return "validation" if hashlib.sha256(key.encode()).digest()[0] < 64 else "train"


def draw_tasks(
    split: Split, count: int, seed: int, draw: Callable[[random.Random], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Distinct tasks of a split, the same for the same arguments.

    Args:
        split: the split.
        count: how many.
        seed: other seeds draw others, of the same split.
        draw: makes a task; its `id` is equal for tasks that are the same, and decides the split.

    Raises:
        ConfigError: there are not so many.
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
