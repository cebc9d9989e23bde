"""Episodes that Palestra plays itself: agent and environment in this process, the same sessions, no HTTP."""

from palestra.rollout.runner import Runner

__all__ = ["Runner"]
