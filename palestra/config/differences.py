"""The settings in which two configurations differ, for messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from palestra.config.job import JobConfig
from palestra.config.policy import PolicyConfig

MOST_NAMED = 4  # differences that a message names
_LONGEST = 60  # characters of a value in a message
_OF_PLAYING = {
    "environment": {"system", "settings", "timeout_seconds"},
    "rollout": {"max_episode_seconds", "strict_history", "dropped_reasoning", "stripped_whitespace"},
    "engine": {"kind"},
}


def name_differences(before: JobConfig, now: JobConfig) -> str:
    """Describe the keys that affect training and differ, with both values; empty: there are none.

    Args:
        before: of the run's start.
        now: of its resumption.
    """
    found = list(_differences(before.what_is_trained(), now.what_is_trained(), ""))
    named = [f"{key} was {_shown(old)} and is {_shown(new)}" for key, old, new in found[:MOST_NAMED]]
    more = len(found) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def name_settings(config: JobConfig) -> str:
    """Describe the settings for playing episodes that are not defaults; empty: all are."""

    def of_playing(job: JobConfig) -> dict[str, Any]:
        policies = {name: one.model_dump(include={"max_context", "sampling"}) for name, one in job.policies.items()}
        return job.model_dump(include=_OF_PLAYING) | {"policies": policies}

    default = JobConfig().model_copy(update={"policies": dict.fromkeys(config.policies, PolicyConfig())})
    found = _differences(of_playing(default), of_playing(config), "")
    return ", ".join(f"{key} = {_shown(value)}" for key, _, value in found)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key and both values of each difference; None for a missing key."""
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{above}{key}.")
        elif old != new:
            yield f"{above}{key}", old, new


def _shown(value: Any) -> str:
    text = "none" if value is None else "a table" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
