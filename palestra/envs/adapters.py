"""Environments of other libraries: what makes Palestra's own out of them is found by entry points."""

from __future__ import annotations

from typing import Any

from palestra.envs.catalog import CATALOG
from palestra.extensions import extensions, load_extension

GROUP = "palestra.adapters"


def adapted(environment: Any) -> Any:
    """Return what makes environments of another library's class, instance or name.

    What no adapter knows is returned as it is, and so is a name of Palestra's own.
    """
    if environment is None or (isinstance(environment, str) and environment.partition("/")[0] in CATALOG):
        return environment
    for point in extensions(GROUP).values():
        if (found := load_extension(point)(environment)) is not None:
            return found
    return environment
