"""The training loop: groups of episodes are gathered and fixed in a manifest, and the manifest makes a new version."""

from palestra.learner.learner import Learner, Report
from palestra.learner.reporting import RunFolder
from palestra.learner.update import policy_spec

__all__ = ["Learner", "Report", "RunFolder", "policy_spec"]
