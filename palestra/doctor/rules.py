"""All rules, and the warnings of a job while it runs."""

from __future__ import annotations

from palestra.doctor.rule import History, Rule
from palestra.doctor.step_rules import STEP_RULES
from palestra.doctor.store_rules import STORE_RULES
from palestra.doctor.trend_rules import TREND_RULES
from palestra.types.progress import HealthWarning

RULES: tuple[Rule, ...] = (*STEP_RULES, *TREND_RULES, *STORE_RULES)


def health_of(history: History, policy: str = "") -> list[HealthWarning]:
    """Return the signs that the newest step shows; none for a run that learns.

    Args:
        history: the rows of the run so far.
        policy: name of the policy that the rows are of, for people; empty if the job has only one.
    """
    if not history.rows:
        return []
    step, whose = int(history.newest["step"]), policy and f"policy {policy}: "
    return [
        HealthWarning(code=rule.code, step=step, text=f"{whose}{seen}; {rule.remedy}")
        for rule in RULES
        if (seen := rule.seen(history)) is not None
    ]
