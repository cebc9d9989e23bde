"""Rollouts in Palestra's own process: agents and environments use the same sessions as remote workers, without HTTP."""

from palestra.rollout.collect import Collected, Step, Termination, TrajectoryCollectEngine
from palestra.rollout.environments import Environments
from palestra.rollout.orchestrator import Outcome, RolloutOrchestrator
from palestra.rollout.pool import RunnerPool
from palestra.rollout.runner import RolloutSpec, Runner
from palestra.rollout.sync_lock import RolloutSyncLock

__all__ = [
    "Collected",
    "Environments",
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
