"""The installed kinds of engines. An entry point of the group `palestra.engines` names each driver.

Drivers are loaded when a configuration is first checked: their modules import this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension

if TYPE_CHECKING:
    from palestra.config.engine import PooledEngineConfig

GROUP = "palestra.engines"
DEFAULT_KIND = "embedded"  # of a table that names none


class KnownEngine(Protocol):
    """The part of a driver that a configuration uses; see `palestra.engine.driver.EngineDriver`."""

    section: type[PooledEngineConfig]


@cache
def drivers() -> Mapping[str, Any]:
    """Return a driver of each installed kind of engine, sorted by kind."""
    found: dict[str, KnownEngine] = {}
    for name, point in extensions(GROUP).items():
        driver: KnownEngine = load_extension(point)()
        if (kind := driver.section.model_fields["kind"].default) != name:
            raise ConfigError(f"the engine {name!r} of {point.value} has a section of kind {kind!r}; make them equal")
        found[name] = driver
    return found


def sections() -> dict[str, type[PooledEngineConfig]]:
    """Return the configuration section of each kind."""
    return {kind: driver.section for kind, driver in drivers().items()}
