"""All rules; those here are of workers and of the disk, whose numbers `store_facts` adds to a row."""

from __future__ import annotations

from palestra.doctor import episodes
from palestra.doctor.audit_rules import AUDIT_RULES
from palestra.doctor.rule import RECENT, Row, Rule, RunHistory
from palestra.doctor.store_facts import (
    CLAIMS,
    COMPLETED,
    COMPLETED_CALLS,
    FAILURES,
    FREE,
    LATE,
    LATE_CALLS,
    LATE_SHARE,
    NEEDED,
    REASON,
)
from palestra_inspect.off_policy_rules import OFF_POLICY_RULES
from palestra_inspect.opponent_rules import OPPONENT_RULES
from palestra_inspect.step_rules import REPLY_RULES, STEP_RULES
from palestra_inspect.trend_rules import TREND_RULES

FAILED_SHARE, LEAST_FAILED = 0.2, 3
LATE_LENGTH = 0.75
RESERVE = 256 * 2**20  # bytes: the databases and the system need room beside the run


def _workers_fail(history: RunHistory) -> str | None:
    recent = [row for row in history.recent if CLAIMS in row]
    claims, failures = (sum(row[name] for row in recent) for name in (CLAIMS, FAILURES))
    if failures < LEAST_FAILED or failures < FAILED_SHARE * claims:
        return None
    counts: dict[str, float] = {}
    for row in recent:
        for name in row:
            if name.startswith(REASON):
                counts[name.removeprefix(REASON)] = counts.get(name.removeprefix(REASON), 0.0) + row[name]
    most = max(counts, key=lambda name: counts[name], default="")
    why = f", most often with: {most}" if most else ""
    return f"in the last {len(recent)} steps {failures:.0f} of {claims:.0f} attempts to play an episode failed{why}"


def _replayed_late(history: RunHistory) -> str | None:
    recent = [row for row in history.recent if LATE in row]
    claims, late, late_calls, completed, calls = (
        sum(row[name] for row in recent) for name in (CLAIMS, LATE, LATE_CALLS, COMPLETED, COMPLETED_CALLS)
    )
    if late < max(LEAST_FAILED, LATE_SHARE * claims) or not completed:
        return None
    if late_calls / late < LATE_LENGTH * calls / completed:
        return None
    return (
        f"in the last {len(recent)} steps {late:.0f} of {claims:.0f} attempts were played again after "
        f"{late_calls / late:.1f} calls of the model on average, and completed episodes had {calls / completed:.1f}"
    )


def _disk_fills(history: RunHistory) -> str | None:
    row: Row = history.newest
    if FREE not in row or row[FREE] >= row[NEEDED] + RESERVE:
        return None
    left = history.job.steps - row["step"]
    return (
        f"{row[FREE] / 2**30:.2f} GiB are free, and the {left:.0f} steps that are left need about "
        f"{row[NEEDED] / 2**30:.2f} GiB at the pace so far"
    )


STORE_RULES = (
    Rule(
        code="workers_fail",
        formula=f"in {RECENT} steps together: attempts that failed ≥ {FAILED_SHARE:g} × attempts, and ≥ {LEAST_FAILED}",
        seen=_workers_fail,
        means="workers crash, lose their lease, or their environment raises; what they played is thrown away",
        remedy="read the reasons in `palestra episodes`; raise rollout.lease_seconds if leases expire",
        shows=episodes.failed,
        of_job=True,
    ),
    Rule(
        code="replays_late",
        formula=f"in {RECENT} steps together: attempts that failed after a call of the model ≥ {LATE_SHARE:g} × "
        f"attempts, and ≥ {LEAST_FAILED}, and their calls on average ≥ {LATE_LENGTH:g} × those of completed episodes",
        seen=_replayed_late,
        means="attempts fail where episodes end, and not anywhere: a model that can make its environment fail when it "
        "is about to lose gets another attempt, and rewards are too high",
        remedy="read what the model did last in such attempts; an environment raises `EnvironmentFailed` only where no "
        "action can be to blame",
        shows=episodes.failed,
        of_job=True,
    ),
    Rule(
        code="disk_fills",
        formula="free bytes of the run's disk < bytes of `run.db` / steps × steps left + newest checkpoint + "
        f"{RESERVE // 2**20} MiB",
        seen=_disk_fills,
        means="the run will end with an error of the disk; what is acknowledged until then is kept",
        remedy="free room, lower checkpoint.keep, or move the folder and go on with --resume",
        shows=episodes.none_of,
        of_job=True,
    ),
)

RULES: tuple[Rule, ...] = (
    *STEP_RULES,
    *REPLY_RULES,
    *OFF_POLICY_RULES,
    *TREND_RULES,
    *AUDIT_RULES,
    *OPPONENT_RULES,
    *STORE_RULES,
)
