"""All rules, and the warnings of a job while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.doctor.off_policy_rules import OFF_POLICY_RULES
from palestra.doctor.opponent_rules import OPPONENT_RULES
from palestra.doctor.reply_rules import REPLY_RULES
from palestra.doctor.rule import Rule, RunHistory
from palestra.doctor.step_rules import STEP_RULES
from palestra.doctor.store_rules import STORE_RULES
from palestra.doctor.trend_rules import TREND_RULES
from palestra.types.progress import HealthWarning

RULES: tuple[Rule, ...] = (*STEP_RULES, *REPLY_RULES, *OFF_POLICY_RULES, *TREND_RULES, *OPPONENT_RULES, *STORE_RULES)

OF_A_POLICY = tuple(rule for rule in RULES if not rule.of_job)
OF_A_JOB = tuple(rule for rule in RULES if rule.of_job)


def health_of(history: RunHistory, policy: str = "", rules: Sequence[Rule] = RULES) -> list[HealthWarning]:
    """Return the signs in the newest step; empty for a run that learns.

    Args:
        policy: of the rows, for people; empty if the job has only one.
    """
    if not history.rows:
        return []
    step, whose = int(history.newest["step"]), policy and f"policy {policy}: "
    return [
        HealthWarning(code=rule.code, step=step, text=f"{whose}{seen}; {rule.remedy}", policy=policy)
        for rule in rules
        if (seen := rule.seen(history)) is not None
    ]
