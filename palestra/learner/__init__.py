"""The training loop: tasks to groups to episodes, full groups to a manifest, a manifest to a new version."""

from palestra.learner.learner import Learner
from palestra.learner.reporting import RunFolder

__all__ = ["Learner", "RunFolder"]
