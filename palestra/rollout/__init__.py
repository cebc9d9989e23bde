"""Episodes that Palestra plays itself: agents and environments in this process, the same sessions, no HTTP."""

from palestra.rollout.collect import Collected, Step, Termination, TrajectoryCollectEngine
from palestra.rollout.orchestrator import Outcome, RolloutOrchestrator
from palestra.rollout.runner import Runner
from palestra.rollout.sync_lock import RolloutSyncLock

__all__ = [
    "Collected",
    "Outcome",
    "RolloutOrchestrator",
    "RolloutSyncLock",
    "Runner",
    "Step",
    "Termination",
    "TrajectoryCollectEngine",
]
