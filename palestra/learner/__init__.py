"""The training loop: groups of episodes are gathered and fixed in a manifest, and the manifest makes a new version."""

from palestra.learner.audit import Audit
from palestra.learner.learner import Learner
from palestra.learner.open_run import OpenRun, Report
from palestra.learner.reporting import RunFolder
from palestra.learner.update import policy_spec

__all__ = ["Audit", "Learner", "OpenRun", "Report", "RunFolder", "policy_spec"]
