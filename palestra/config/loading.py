"""Reads a `JobConfig` from TOML and writes it back.

An error is one line that names the key and the nearest known one.
"""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import tomli_w
from pydantic import ValidationError

from palestra.config.engine import EngineConfig
from palestra.config.job import JobConfig
from palestra.config.judge import JudgeConfig
from palestra.config.parts import HarnessConfig, SandboxConfig
from palestra.config.policy import PolicyConfig
from palestra.config.section import Mistake, Section, explain, explain_all, key_parts, sections_of
from palestra.errors import ConfigError
from palestra.extensions import KINDS, extensions
from palestra.sandbox import is_image_path


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file in UTF-8; a byte order mark is skipped."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


MOST_NAMED = 4  # differences that a message names
_LONGEST = 60  # characters of a value in a message
_OF_PLAYING = {
    "environment": {"system", "settings"},
    "rollout": {"timeout_seconds", "changed_history"},
    "engine": {"kind"},
}


def name_differences(before: JobConfig, now: JobConfig) -> str:
    """Describe the keys that affect training and differ, with both values; empty: there are none."""
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


SAVED_CONFIG = "config.toml"  # in a run's folder, next to run.db
_NAME_OR_PATH_KEYS = frozenset({"model", "from_run", "reference"})
_OTHERS_TABLES = frozenset({"settings", "teacher_server"})  # an environment's own keys; names on a server
UNSET: Final = object()  # value of an override that removes a key


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """Read a job's configuration from a TOML file. Relative paths are relative to the file.

    `model`, `reference` and `from_run` may also be names: they are paths if they begin with `.` or `~`, or if such a
    folder exists. `image` is one if it ends like an archive, or begins like a path. `~` is the home directory.

    Args:
        path: path of the file.
        overrides: values by dotted key, which replace those of the file. Quote a part of a key that contains a dot, as
            in `policies."v1.5".frozen`.

    Raises:
        ConfigError: the file does not exist or is not TOML, a key is unknown, or a value is out of range.
    """
    return parse_config(read_tables(Path(path)), overrides, source=str(path))


def load_saved_config(folder: Path) -> JobConfig:
    """Read the configuration that a run was started with."""
    path = folder / SAVED_CONFIG
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise ConfigError(f"{path} is not a file")
    return load_config(path)


def find_mistakes(path: Path, overrides: Mapping[str, Any] | None = None) -> tuple[JobConfig | None, list[Mistake]]:
    """Read a configuration like `load_config`, and return all of its mistakes, each once.

    The returned configuration lacks the wrong keys, so that the rest can be checked; None: a mistake is not about one
    key.
    """
    merged = with_overrides(read_tables(path), overrides, str(path))
    mistakes: list[Mistake] = []
    while True:
        try:
            return JobConfig.model_validate(merged), mistakes
        except ValidationError as error:
            found = explain_all(error, JobConfig)
        mistakes += [mistake for mistake in found if mistake not in mistakes]
        # What is right in itself may not fit together, which pydantic says only where all keys are right.
        if not any([_removed(merged, mistake.place) for mistake in found]):
            return None, mistakes


def _removed(data: dict[str, Any], place: Sequence[str]) -> bool:
    """Remove a key from nested tables, and return whether it was there."""
    level: Any = data
    for step in place[:-1]:
        level = level.get(step) if isinstance(level, dict) else None
    if not place or not isinstance(level, dict) or place[-1] not in level:
        return False
    del level[place[-1]]
    return True


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, with absolute paths; see `load_config`."""
    if (path / SAVED_CONFIG).is_file():  # the folder of a run
        path = path / SAVED_CONFIG
    data = read_toml(path)
    resolve_paths(data, path.parent)
    return data


def resolve_paths(table: dict[str, Any], folder: Path, names: bool = True) -> None:
    """Make the paths of a configuration absolute, in place. `names`: whether to include names of models and runs that
    are folders.
    """
    for key, value in table.items():
        if isinstance(value, dict) and key not in _OTHERS_TABLES:
            resolve_paths(value, folder, names)
        elif isinstance(value, str) and value:
            place = folder / os.path.expanduser(value)
            is_folder = value.startswith(("./", "../", "~/")) or place.is_dir()
            is_path = key in path_keys() or (key == "image" and is_image_path(value))
            if is_path or (names and key in _NAME_OR_PATH_KEYS and is_folder):
                table[key] = os.path.abspath(place)


@cache
def path_keys() -> frozenset[str]:
    """Return the keys whose values are paths, in any table."""
    read = (EngineConfig, JudgeConfig, HarnessConfig, SandboxConfig)
    kinds: list[type[Section]] = [kind for section in read for kind in sections_of(section)]
    return frozenset(
        {"run_dir", "train", "validation", "path"}
        | {key for kind in kinds for key, field in kind.model_fields.items() if _is_path(field.annotation)}
    )


def _is_path(annotation: Any) -> bool:
    return annotation is Path or any(_is_path(part) for part in get_args(annotation))


def dump_saved_config(config: JobConfig) -> str:
    """Return the whole configuration as TOML with the same meaning wherever it is read; see `dump_config`."""
    data = config.model_dump(mode="json", exclude_none=True)
    resolve_paths(data, Path.cwd(), names=False)  # models and source runs stay as the run's digest has them
    return tomli_w.dumps(data)


def parse_config(
    data: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, source: str = "config"
) -> JobConfig:
    """Validate a mapping and return the configuration. `overrides`: values by dotted key. `UNSET` removes a key, so
    that its default holds.
    """
    tables = with_overrides(data, overrides, source)
    if isinstance(kind := tables.get("kind"), str) and kind in extensions(KINDS):
        raise ConfigError(f"{source}: kind is {kind!r}; start it with `palestra run`, no service or script can")
    try:
        return JobConfig.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, JobConfig)}") from error


def with_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any] | None, source: str) -> dict[str, Any]:
    """Return nested tables with overrides in them; see `parse_config`."""
    merged: dict[str, Any] = copy.deepcopy(dict(data))
    for dotted, value in (overrides or {}).items():
        *parents, leaf = key_parts(dotted)
        level = merged
        for parent in parents:
            level = level.setdefault(parent, {})
            if not isinstance(level, dict):
                raise ConfigError(f"{source}: {dotted} can't be set: {parent!r} is not a section")
        if value is UNSET and _is_known((*parents, leaf)):
            level.pop(leaf, None)
        else:
            level[leaf] = None if value is UNSET else value  # the check that follows refuses an unknown key
    return merged


def dump_config(config: JobConfig) -> str:
    """Return the whole configuration as TOML, including defaults; `parse_config` of the text gives an equal one.

    Args:
        config: the job; keys with the value None are left out, because TOML has no null.
    """
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _is_known(path: tuple[str, ...]) -> bool:
    """Return whether a dotted key can be set; keys inside of a free table always can."""
    annotation: Any = JobConfig
    for step in path:
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
            continue
        fields = {name: field for section in sections_of(annotation) for name, field in section.model_fields.items()}
        if step not in fields:
            return False
        annotation = fields[step].annotation
    return True
