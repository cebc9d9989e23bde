"""Trackers by name: Palestra's own, and plug-ins of other packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension
from palestra.tracking.base import TrackedRun, Tracker

GROUP = "palestra.trackers"  # entry points of plug-ins
# Class, module of the library, and the package that has it.
SHIPPED = {
    "tensorboard": ("palestra.tracking.tensorboard:TensorBoardTracker", "tensorboard", "tensorboard"),
    "wandb": ("palestra.tracking.wandb:WandbTracker", "wandb", "wandb"),
    "mlflow": ("palestra.tracking.mlflow:MlflowTracker", "mlflow", "mlflow-skinny"),
    "opentelemetry": (
        "palestra.tracking.opentelemetry:OpenTelemetryTracker",
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    ),
    "trackio": ("palestra.tracking.trackio:TrackioTracker", "trackio", "trackio"),
}


def known_trackers() -> list[str]:
    """Return the names of all trackers, Palestra's own first."""
    return [*SHIPPED, *(name for name in extensions(GROUP) if name not in SHIPPED)]


def check_trackers(names: Sequence[str]) -> None:
    """Check that these trackers exist and that their libraries are installed, without importing anything."""
    known = known_trackers()
    if len(set(names)) < len(names):  # each is a process, and two would write the same files
        raise ConfigError(f"tracking: a tracker is named twice in {', '.join(names)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"tracking: there is no tracker {name!r}; there are {', '.join(known)}")
        if name in SHIPPED and not _installed(SHIPPED[name][1]):
            package = SHIPPED[name][2]
            raise ConfigError(f"tracking: {name} needs {package}, which is not installed: pip install {package}")


def _installed(module: str) -> bool:
    """Return whether a module could be imported; of one in a package, the packages around it are."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def create_tracker(name: str, run: TrackedRun) -> Tracker:
    """Return a new tracker.

    Args:
        name: one of `known_trackers`.
    """
    check_trackers([name])
    if name in SHIPPED:
        module, _, cls = SHIPPED[name][0].partition(":")
        made: Tracker = getattr(import_module(module), cls)(run)
        return made
    found: Tracker = load_extension(extensions(GROUP)[name])(run)
    return found
