"""Palestra: reinforcement learning for LLM agents, as a service.

    from palestra import Client                     # drive episodes from a script of yours
    from palestra import JobConfig, train           # or let Palestra call your rollout function
    from palestra import Play                       # or play your environment itself
    from palestra import ControlClient              # submit jobs to a team's server

Names are loaded when they are first used, so that importing the client loads neither torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra.client import AsyncClient, Client, Episode, Policy, RolloutResult
    from palestra.client.control import ControlClient
    from palestra.cluster.job_thread import TrainResult
    from palestra.cluster.playing import play
    from palestra.cluster.training import train
    from palestra.config import JobConfig, load_config
    from palestra.rollout import Play

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "Client",
    "ControlClient",
    "Episode",
    "JobConfig",
    "Play",
    "Policy",
    "RolloutResult",
    "TrainResult",
    "load_config",
    "play",
    "train",
]

_HOMES = {
    "AsyncClient": "palestra.client",
    "Client": "palestra.client",
    "ControlClient": "palestra.client.control",
    "Episode": "palestra.client",
    "Policy": "palestra.client",
    "RolloutResult": "palestra.client",
    "TrainResult": "palestra.cluster.job_thread",
    "train": "palestra.cluster.training",
    "JobConfig": "palestra.config",
    "Play": "palestra.rollout",
    "play": "palestra.cluster.playing",
    "load_config": "palestra.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'palestra' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
