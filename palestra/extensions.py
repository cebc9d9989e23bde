"""What other packages add to Palestra, found by entry points. Packages next to the core are found in the same way.

An entry point's name is what users write, and it leads to one object:

| group | object |
|---|---|
| `palestra.adapters` | see `palestra.envs.catalog`: what makes environments of another library's class or instance |
| `palestra.agents` | an agent, agents by role, or what makes them; see `palestra.agents.agent` |
| `palestra.algorithms` | a class derived from `palestra.Algorithm` |
| `palestra.base_servers` | what connects a job to a shared base; see `palestra.runtime.parts.BaseConnection` |
| `palestra.commands` | a function that adds `palestra NAME` to the subparsers of `argparse` that it is given |
| `palestra.engines` | a `palestra.engine.driver.EngineDriver` |
| `palestra.environment_servers` | an environment at another project's server: `(url, key=, system=, **settings)` |
| `palestra.environments` | a `palestra.envs.CatalogEntry` |
| `palestra.harnesses` | a `palestra_harness.Harness` |
| `palestra.judges` | a class derived from `palestra.config.JudgeConfig`; see `palestra.envs.judge` |
| `palestra.kernels` | a function that returns a `palestra.models.kernels.Kernels` |
| `palestra.kinds` | (tables, settings, source) -> configuration and `JobTerms` of a kind of run |
| `palestra.names` | a name that `palestra` exports |
| `palestra.renderers` | (tokenizer, pictures) -> a `palestra.renderers.Renderer`, or None: not of this model |
| `palestra.rewards` | a function, as `reward=` of `palestra.train` takes it |
| `palestra.rules` | signs of problems in a run: a tuple of `palestra.doctor.rule.Rule` |
| `palestra.sandboxes` | a class of `palestra.sandbox.SandboxProvider`, called without arguments |
| `palestra.services` | (job, URL of a service) -> a function that returns URL and key of the job's server |
| `palestra.tools` | tools of an agent; see `palestra.tools.manager` |
| `palestra.tables` | (folder of a run) -> columns and rows that `palestra top` shows, or None: not of this run |
| `palestra.trackers` | a `palestra.tracking.registry.Tracker` |
| `palestra.trainers` | what makes a trainer over several devices; see `palestra.runtime.parts.trainer_maker` |
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError
from palestra.extras import missing_extra

KINDS = "palestra.kinds"
FUNCTION = "module:function, or path/to/file.py:function"


def extensions(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        if (first := found.setdefault(point.name, point)).value != point.value:
            raise ConfigError(f"two packages have {point.name!r} in {group}: {first.value} and {point.value}")
    return found


def load_extension(point: EntryPoint) -> Any:
    """Return an entry point's object."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and missing_extra(error) is not None:
            raise
        raise ConfigError(f"{point.name!r} of {point.group} can't be loaded from {point.value}: {error}") from error


def sole_extension(group: str, missing: str) -> Any:
    """Return the object of a group's only entry point, or of the first by name. Raises ConfigError with the text
    `missing` if there is none.
    """
    point = next(iter(extensions(group).values()), None)
    if point is None:
        raise ConfigError(missing)
    return load_extension(point)


def load_function(reference: str, group: str | None = None) -> Any:
    """Import and return the object named by `module:function` or `path/to/file.py:function`. `group`: of entry points
    whose names are accepted too; None: none.
    """
    place, colon, name = reference.rpartition(":")
    if group is not None and not colon and (point := extensions(group).get(reference)) is not None:
        return load_extension(point)
    if not colon or not place or not name:
        raise ConfigError(f"{reference!r}: expected {FUNCTION}")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None or not Path(place).is_file():
                raise ConfigError(f"{place}: no such file")
            module = importlib.util.module_from_spec(spec)
            # Dataclasses and pickling look their module up by its name.
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            # An installed command does not look in the working folder, where a user's module lies.
            sys.path.insert(0, "")
            module = importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"{reference}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{place} has no {name!r}")
    return getattr(module, name)


def nearest(name: str, known: Collection[str], form: str = "{}", cutoff: float = 0.6) -> str:
    """Return `; did you mean X?` for the most similar known name; empty without a similar one.

    Args:
        form: the known name's format, with `{}` in its place.
        cutoff: required similarity, from 0 to 1.
    """
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {form.format(found[0])}?" if found else ""
