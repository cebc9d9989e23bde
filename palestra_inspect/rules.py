"""All rules; those here are of workers and of the disk, whose numbers `store_facts` adds to a row."""

from __future__ import annotations

from palestra.doctor.rule import RECENT, Row, Rule, RunHistory, in_each, in_each_recent, mean, steps_of
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
from palestra_inspect import rule_episodes
from palestra_inspect.audit_rules import AUDIT_RULES
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
        shows=rule_episodes.failed,
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
        shows=rule_episodes.failed,
        of_job=True,
    ),
    Rule(
        code="disk_fills",
        formula="free bytes of the run's disk < bytes of `run.db` / steps × steps left + newest checkpoint + "
        f"{RESERVE // 2**20} MiB",
        seen=_disk_fills,
        means="the run will end with an error of the disk; what is acknowledged until then is kept",
        remedy="free room, lower checkpoint.keep, or move the folder and go on with --resume",
        shows=rule_episodes.none_of,
        of_job=True,
    ),
)


# Nats. bfloat16 rounds logprobs by about 0.01 on average; float32 by less than a millionth.
GAP = 0.05
GAP_GROWTH, GAP_GROWN = 10.0, 0.01  # times the gap of the first steps, and nats from which on growth counts
RATIO = (0.8, 1.25)  # in healthy runs of all algorithms the mean ratio of a step stayed within 0.89 and 1.02
CLIPPED_ON_POLICY = 0.1  # share of the tokens of the newest policy, none of which would be clipped without a gap
CLIPPED = 0.3  # share of tokens; healthy updates clip a few hundredths
OFF_POLICY_GAP = 0.3  # nats; a policy that is two versions older is within a few hundredths
OLD = 4.0  # versions


def _on_policy(row: Row) -> bool:
    """Return whether a step trained only tokens of the newest policy, so that its gap is due to rounding."""
    return "train/logprob_gap_mean" in row and not row.get("rollout/staleness_max", 0.0)


def _logprob_drift(history: RunHistory) -> str | None:
    recent = history.last(RECENT)
    if not in_each(recent, _on_policy):
        return None
    now = mean(recent, "train/logprob_gap_mean") or 0.0
    before = mean([row for row in history.start[:RECENT] if _on_policy(row)], "train/logprob_gap_mean")
    if in_each(recent, lambda row: row["train/logprob_gap_mean"] > GAP):
        return f"{steps_of(recent)} engine and trainer disagree on a token's logprob by {now:.2g} nats on average"
    if before is None or now <= max(GAP_GROWTH * before, GAP_GROWN):
        return None
    return (
        f"engine and trainer disagree on a token's logprob by {now:.2g} nats on average, and in the first steps by "
        f"{before:.2g}"
    )


def _ratio_out_of_range(history: RunHistory) -> str | None:
    recent = history.last(RECENT)
    for name in ("train/ratio_mean", "train/importance_mean"):
        if in_each(recent, lambda row, name=name: not RATIO[0] <= row.get(name, 1.0) <= RATIO[1]):  # type: ignore[misc]
            return f"{steps_of(recent)} {name} is outside of {RATIO[0]:g} to {RATIO[1]:g} (now {recent[-1][name]:.3g})"
    name = "train/clip_fraction_on_policy"
    if not in_each(recent, lambda row: row.get(name, 0.0) > CLIPPED_ON_POLICY):
        return None
    return f"{steps_of(recent)} tokens of the newest policy were clipped before it changed ({recent[-1][name]:.0%})"


def _off_policy_gap(history: RunHistory) -> str | None:
    recent = history.recent
    name = "train/logprob_gap_mean"
    if all(map(_on_policy, recent)) or not in_each(recent, lambda row: row.get(name, 0.0) >= OFF_POLICY_GAP):
        return None
    return (
        f"{steps_of(recent)} the policy's logprob of a token is {mean(recent, name):.2g} nats from that of its sampling"
    )


def _clipped(history: RunHistory) -> str | None:
    return None if history.job.narrow_clip else _CLIPPED(history)


_CLIPPED = in_each_recent("train/clip_fraction", CLIPPED, "{now:.0%} of the tokens were clipped, so they teach nothing")
_CORRECT = "lower rollout.max_staleness, or correct with algorithm.importance_sampling"
_LESS = f"lower learning_rate or algorithm.epochs, {_CORRECT}"

OFF_POLICY_RULES = (
    Rule(
        code="logprob_drift",
        formula=f"of {RECENT} steps without stale tokens: `train/logprob_gap_mean` > {GAP:g} nats in each, or its "
        f"mean > {GAP_GROWTH:g} × the mean of the first {RECENT} and > {GAP_GROWN:g}",
        seen=_logprob_drift,
        means="engine and trainer do not have the same weights, precision or sampling parameters, so the gradient is "
        "that of another policy",
        remedy="use one dtype for engine and trainer, correct with algorithm.importance_sampling, and look whether the "
        "engine got the weights of the last step",
        shows=rule_episodes.longest,
    ),
    Rule(
        code="ratio_out_of_range",
        formula=f"in each of {RECENT} steps: `train/ratio_mean` outside of {RATIO[0]:g} to {RATIO[1]:g}, or "
        f"`train/importance_mean`, or `train/clip_fraction_on_policy` > {CLIPPED_ON_POLICY:g}",
        seen=_ratio_out_of_range,
        means="a step moves the policy too far from the one that played, or the episodes are too old",
        remedy=_LESS,
        shows=rule_episodes.longest,
    ),
    Rule(
        code="tokens_clipped",
        formula=f"`train/clip_fraction` ≥ {CLIPPED:g} in each of {RECENT} steps; not of `gspo`, whose bounds are "
        "narrow",
        seen=_clipped,
        means="the updates of a step move the policy too far from the one that played",
        remedy=_LESS,
        shows=rule_episodes.longest,
    ),
    Rule(
        code="off_policy_gap",
        formula=f"`train/logprob_gap_mean` ≥ {OFF_POLICY_GAP:g} nats in each of {RECENT} steps, one of which at least "
        "has trained stale tokens",
        seen=_off_policy_gap,
        means="the policy has moved far since the episodes were sampled, so the gradient is that of another policy",
        remedy=_LESS,
        shows=rule_episodes.longest,
    ),
    Rule(
        code="tokens_stale",
        formula=f"`rollout/staleness_mean` ≥ {OLD:g} in each of {RECENT} steps",
        seen=in_each_recent(
            "rollout/staleness_mean", OLD, "a token was {now:.1f} versions older than the policy that is trained"
        ),
        means="episodes take longer than several updates, so the policy learns from what it does not do any more",
        remedy=f"use more or faster workers, {_CORRECT}",
        shows=rule_episodes.longest,
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
