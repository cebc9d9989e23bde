"""Adapters for environments of other libraries, found by entry points."""

from __future__ import annotations

from typing import Any

from palestra.envs.catalog import CATALOG
from palestra.extensions import extensions, load_extension

GROUP = "palestra.adapters"


def adapted(environment: Any) -> Any:
    """Return a factory of environments for another library's class, instance or name.

    An object that no adapter knows, and a name of Palestra's own, is returned unchanged.
    """
    if environment is None or (isinstance(environment, str) and environment.partition("/")[0] in CATALOG):
        return environment
    for point in extensions(GROUP).values():
        if (found := load_extension(point)(environment)) is not None:
            return found
    return environment
