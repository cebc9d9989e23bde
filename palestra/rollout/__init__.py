"""Rollouts: an episode is played by agents in an environment, wherever the model calls are answered."""

from palestra.rollout.collect import TrajectoryCollectEngine
from palestra.rollout.orchestrator import EnvironmentPool, RolloutOrchestrator, RolloutSpec, WorkOutcome
from palestra.rollout.remote import EnvironmentPlayer
from palestra.rollout.result import EpisodeResult, Step, Termination

__all__ = [
    "EnvironmentPlayer",
    "EnvironmentPool",
    "EpisodeResult",
    "RolloutOrchestrator",
    "RolloutSpec",
    "Step",
    "Termination",
    "TrajectoryCollectEngine",
    "WorkOutcome",
]
