"""Rollouts in Palestra's own process: agents and environments use the same sessions as remote workers, without HTTP."""

from palestra.rollout.collect import TrajectoryCollectEngine
from palestra.rollout.environment_pool import EnvironmentPool
from palestra.rollout.orchestrator import Outcome, RolloutOrchestrator
from palestra.rollout.pool import RunnerPool
from palestra.rollout.remote import EnvironmentPlayer
from palestra.rollout.result import EpisodeResult, Step, Termination
from palestra.rollout.runner import RolloutSpec, Runner
from palestra.rollout.sync_lock import RolloutSyncLock

__all__ = [
    "EnvironmentPlayer",
    "EnvironmentPool",
    "EpisodeResult",
    "Outcome",
    "RolloutOrchestrator",
    "RolloutSpec",
    "RolloutSyncLock",
    "Runner",
    "RunnerPool",
    "Step",
    "Termination",
    "TrajectoryCollectEngine",
]
