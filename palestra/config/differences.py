"""The settings in which two configurations differ, for the message of a run that can't be resumed with one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from palestra.config.job import JobConfig

MOST_NAMED = 4  # differences that a message names
_LONGEST = 60  # characters of a value in a message


def name_differences(before: JobConfig, now: JobConfig) -> str:
    """Return in words which keys decide what is trained and differ, with both values; empty: there are none.

    Args:
        before: the configuration that a run was started with.
        now: the one that it is to be resumed with.
    """
    found = list(_differences(before.what_is_trained(), now.what_is_trained(), ""))
    named = [f"{key} was {_shown(old)} and is {_shown(new)}" for key, old, new in found[:MOST_NAMED]]
    more = len(found) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key and both values of each difference; None stands for a key that is not there."""
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{above}{key}.")
        elif old != new:
            yield f"{above}{key}", old, new


def _shown(value: Any) -> str:
    text = "none" if value is None else "a table" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
