"""Signs of training that is off-policy: tokens of another policy than the one that is trained, or of an old one."""

from __future__ import annotations

from palestra.doctor import episodes
from palestra.doctor.rule import RECENT, Row, Rule, RunHistory, in_each, in_each_recent, mean, steps_of

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
        shows=episodes.longest,
    ),
    Rule(
        code="ratio_out_of_range",
        formula=f"in each of {RECENT} steps: `train/ratio_mean` outside of {RATIO[0]:g} to {RATIO[1]:g}, or "
        f"`train/importance_mean`, or `train/clip_fraction_on_policy` > {CLIPPED_ON_POLICY:g}",
        seen=_ratio_out_of_range,
        means="a step moves the policy too far from the one that played, or the episodes are too old",
        remedy=_LESS,
        shows=episodes.longest,
    ),
    Rule(
        code="tokens_clipped",
        formula=f"`train/clip_fraction` ≥ {CLIPPED:g} in each of {RECENT} steps; not of `gspo`, whose bounds are "
        "narrow",
        seen=_clipped,
        means="the updates of a step move the policy too far from the one that played",
        remedy=_LESS,
        shows=episodes.longest,
    ),
    Rule(
        code="off_policy_gap",
        formula=f"`train/logprob_gap_mean` ≥ {OFF_POLICY_GAP:g} nats in each of {RECENT} steps, one of which at least "
        "has trained stale tokens",
        seen=_off_policy_gap,
        means="the policy has moved far since the episodes were sampled, so the gradient is that of another policy",
        remedy=_LESS,
        shows=episodes.longest,
    ),
    Rule(
        code="tokens_stale",
        formula=f"`rollout/staleness_mean` ≥ {OLD:g} in each of {RECENT} steps",
        seen=in_each_recent(
            "rollout/staleness_mean", OLD, "a token was {now:.1f} versions older than the policy that is trained"
        ),
        means="episodes take longer than several updates, so the policy learns from what it does not do any more",
        remedy=f"use more or faster workers, {_CORRECT}",
        shows=episodes.longest,
    ),
)
