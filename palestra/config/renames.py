"""Keys and values of `JobConfig` that had other names in an earlier version: one table, read in both directions.

A user who writes an old name gets an error that says the new one (`config.explaining`). A file that an earlier version
wrote, such as the config.toml of a resumed run or a job in the control plane's store, is translated
(`in_present_names`). The digest of a job must not change between versions, so it is computed from the first names
(`in_first_names`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Rename:
    """A key that has a new name, and the values of it that have new names."""

    section: str  # the table of the job's configuration that has the key
    before: str  # the key's first name
    now: str
    values: Mapping[str, str] = field(default_factory=dict)  # first name of a value -> present name


RENAMES = (
    Rename(
        section="algorithm",
        before="aggregation",
        now="loss_agg_mode",
        values={"rollout": "seq-mean-token-mean", "token": "token-mean", "constant": "seq-mean-token-sum-norm"},
    ),
    Rename(
        section="algorithm",
        before="importance",
        now="importance_sampling",
        values={
            "token_truncate": "token-truncate",
            "token_mask": "token-mask",
            "sequence_truncate": "sequence-truncate",
            "sequence_mask": "sequence-mask",
        },
    ),
    Rename(
        section="algorithm",
        before="abandoned",
        now="train_on",
        values={"train": "all-calls", "exclude": "final-branch"},
    ),
    Rename(section="engine", before="kind", now="kind", values={"scripted": "fake"}),
    Rename(section="engine", before="scripted_delay_seconds", now="delay_seconds"),
    Rename(section="engine", before="scripted_tokens", now="reply_tokens"),
)

# Before each kind of engine had keys of its own, every file and every digest contained all of these keys; the values
# are the defaults of that time.
_FIRST_ENGINE: Mapping[str, Any] = {
    "kind": "embedded",
    "dtype": "bfloat16",
    "device": "auto",
    "threads": None,
    "max_batch": 64,
    "prefill_tokens": 2048,
    "prefill_chunk": 512,
    "cache_gib": None,
    "in_flight_updates": "continue",
    "prefix_cache_tokens": 32768,
    "scripted_delay_seconds": 0.0,
    "scripted_tokens": 32,
}
# The order of the keys in digests of jobs, from before each algorithm had keys of its own.
_FIRST_ALGORITHM = (
    "name",
    "advantage_scale",
    "clip_low",
    "clip_high",
    "aggregation",
    "credit",
    "discount",
    "importance",
    "importance_limit",
    "abandoned",
    "epochs",
)
# Of those keys, by their present names, what an engine of the other kind has no place for. Keys that came later stay.
_OF_FAKE = frozenset(("delay_seconds", "reply_tokens"))
_OF_EMBEDDED = frozenset(key for key in _FIRST_ENGINE if key != "kind" and not key.startswith("scripted_"))


def in_present_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that an earlier version wrote, with the names of this version.

    Args:
        saved: a whole configuration or a part of one, as nested tables; present names stay as they are.
    """
    found = dict(saved)
    for rename in RENAMES:
        section = found.get(rename.section)
        if isinstance(section, Mapping) and rename.before in section:
            found[rename.section] = {
                rename.now if key == rename.before else key: _value(rename.values, value)
                if key == rename.before
                else value
                for key, value in section.items()
            }
    if isinstance(engine := found.get("engine"), Mapping):
        others = _OF_EMBEDDED if engine.get("kind") == "fake" else _OF_FAKE
        found["engine"] = {key: value for key, value in engine.items() if key not in others}
    return found


def in_first_names(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped `JobConfig` with the first names of its keys and values, in their first order."""
    found = dict(dumped)
    for rename in RENAMES:
        first = {now: before for before, now in rename.values.items()}
        found[rename.section] = {
            rename.before if key == rename.now else key: _value(first, value) if key == rename.now else value
            for key, value in found[rename.section].items()
        }
    found["engine"] = {**_FIRST_ENGINE, **found["engine"]}
    algorithm = found["algorithm"]
    first = {key: algorithm[key] for key in _FIRST_ALGORITHM if key in algorithm}
    found["algorithm"] = {**first, **algorithm}
    return found


def new_name(key: str, known: Collection[str]) -> Rename | None:
    """Return the rename of an old key, or None if the key is not an old name.

    Args:
        key: last part of an unknown key.
        known: keys of the section in which it was written.
    """
    return next((rename for rename in RENAMES if rename.before == key and rename.now in known), None)


def new_value(key: str, value: object) -> str | None:
    """Return the present name of an old value of a renamed key, or None if the value is not an old name."""
    return next(
        (
            rename.values[value]
            for rename in RENAMES
            if rename.now == key and isinstance(value, str) and value in rename.values
        ),
        None,
    )


def _value(names: Mapping[str, str], value: Any) -> Any:
    return names.get(value, value) if isinstance(value, str) else value
