"""Trackers by name, which packages add."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run, as trackers name it.

    Attributes:
        key: identifies the run's folder: the same after a restart, another one in another folder.
        store: file of the run's store, for trackers that show more than metrics; open it with `browse`.
        folder: for files of this tracker; exists.
        settings: values of the configuration, by dotted key.
    """

    name: str
    key: str
    store: Path
    folder: Path
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """Shows the metrics of a run to people; constructed with a `TrackedRun`, in its own process.

    `begin` is called first, and again when rows already written were replaced, as after a kill and resume; all rows
    follow again. All calls come from one thread, which may block.
    """

    def begin(self) -> None:
        """Start the record of the run, replacing everything that this tracker has of it."""

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add the row of a step. `values`: metrics by name, finite. `at`: Unix time of the step, in seconds."""

    def flush(self) -> None:
        """Make the written rows visible to others."""

    def close(self, completed: bool) -> None:
        """End the record. `completed`: whether the job completed; False: it failed, was stopped or is still running."""


def key_of(folder: Path) -> str:
    """Return a key for the run in a folder: 16 hexadecimal digits."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


GROUP = "palestra.trackers"
LIBRARIES = {  # of trackers by name: module, and the package that has it
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "opentelemetry": (
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    ),
    "trackio": ("trackio", "trackio"),
}


def known_trackers() -> list[str]:
    """Return the names of all trackers, sorted."""
    return list(extensions(GROUP))


def check_trackers(names: Sequence[str]) -> None:
    """Check that these trackers exist and that their libraries are installed, without importing anything."""
    known = known_trackers()
    if len(set(names)) < len(names):  # each is a process, and two would write the same files
        raise ConfigError(f"tracking: a tracker is named twice in {', '.join(names)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"tracking: there is no tracker {name!r}; there are {', '.join(known)}")
        if name in LIBRARIES and not _installed(LIBRARIES[name][0]):
            package = LIBRARIES[name][1]
            raise ConfigError(f"tracking: {name} needs {package}, which is not installed: pip install {package}")


def _installed(module: str) -> bool:
    """Return whether a module could be imported; of one in a package, the packages around it are."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def create_tracker(name: str, run: TrackedRun) -> Tracker:
    """Return a new tracker."""
    check_trackers([name])
    found: Tracker = load_extension(extensions(GROUP)[name])(run)
    return found
