"""Episodes that Palestra plays itself: agents and environments in this process, the same sessions, no HTTP."""

from palestra.rollout.collect import Collected, Step, Termination, TrajectoryCollectEngine
from palestra.rollout.runner import Runner

__all__ = ["Collected", "Runner", "Step", "Termination", "TrajectoryCollectEngine"]
