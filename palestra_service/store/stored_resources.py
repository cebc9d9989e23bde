"""A job's resources as columns: three numbers, and a JSON object of further values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson

from palestra.database import to_json
from palestra.types.jobs import Bundle, Resources

_NUMBERS = ("cpus", "gpus", "memory_gib")


def more_resources(resources: Resources) -> str | None:
    """Return a job's resources without a column of their own, as JSON; None: there are none."""
    rest = {name: value for name, value in asdict(resources).items() if name not in _NUMBERS}
    plain = {name: value for name, value in asdict(Resources()).items() if name not in _NUMBERS}
    return None if rest == plain else to_json(rest)


def resources_of_row(row: Any) -> Resources:
    """Return the resources of a row of `jobs`."""
    rest = {} if row.more_resources is None else orjson.loads(row.more_resources)
    bundles = tuple(Bundle(**bundle) for bundle in rest.pop("bundles", ()))
    return Resources(cpus=row.cpus, gpus=row.gpus, memory_gib=row.memory_gib, bundles=bundles, **rest)
