"""Signs that a run learns nothing although its steps succeed, found from the rows of its metrics alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.types.progress import HealthWarning

Row = Mapping[str, float]

# Consecutive steps that must show a sign that may occur by chance in one of them: groups of equal rewards are common
# while a task is nearly always failed, or nearly always solved. A shorter run is judged by all of its steps.
RECENT = 3
# Share of the entropy of the step before. An update within the clip range changes a probability by a fifth, so an
# entropy that falls to a tenth in one step is not learning: the update was far too large.
ENTROPY_SHARE = 0.1
# Nats. If the entropy is small already (a model that is sure of the right answer), a fall to a tenth is noise.
ENTROPY_FALL = 0.1
# Share of calls. A run that learns well may have nine of ten replies cut (as the demo does, whose answers come first),
# so only a limit at which no reply is finished counts as a sign.
TRUNCATED_SHARE = 1.0
EQUAL = 1e-9  # standard deviation of rewards below which they are equal, but for rounding


def health_of(rows: Sequence[Row], groups_per_step: int, steps: int, policy: str = "") -> list[HealthWarning]:
    """Return the signs that a run learns nothing now; none for a run that learns.

    Args:
        rows: metrics of the newest training steps, oldest first; `RECENT` rows are enough.
        groups_per_step: number of groups in each step.
        steps: number of steps of the job.
        policy: name of the policy that the rows are of, for people; empty if the job has only one.
    """
    if not rows:
        return []
    enough = min(RECENT, steps)
    recent = rows[-enough:] if len(rows) >= enough else []
    checks = (
        _no_calls(rows[-1]),
        _equal_rewards(recent, groups_per_step),
        _no_gradient(rows[-1], groups_per_step),
        _updates_skipped(rows[-1]),
        _entropy_collapse(rows),
        _truncated(recent),
        _dropped(rows[-1], groups_per_step),
        _discarded(rows[-1]),
    )
    step = int(rows[-1]["step"])
    whose = policy and f"policy {policy}: "
    return [HealthWarning(code=found[0], step=step, text=whose + found[1]) for found in checks if found is not None]


Found = tuple[str, str] | None  # code, text


def _no_calls(row: Row) -> Found:
    without, episodes = row["train/episodes_without_tokens"], row["train/episodes"]
    if not episodes or 2 * without < episodes:
        return None
    what = "called frozen policies only" if row.get("train/calls_frozen") else "never called the model"
    return (
        "no_calls",
        f"{without:.0f} of {episodes:.0f} episodes of step {row['step']:.0f} {what}, so nothing is "
        "trained on them; send the calls to endpoint.base_url with endpoint.api_key, or return None for what is not to "
        "be scored",
    )


def _steps(recent: Sequence[Row]) -> str:
    return "in the only step so far" if len(recent) == 1 else f"in each of the last {len(recent)} steps"


def _equal_rewards(recent: Sequence[Row], groups_per_step: int) -> Found:
    if not recent or any(row["train/groups_zero_variance"] < groups_per_step for row in recent):
        return None
    if all(row["train/episodes_without_tokens"] == row["train/episodes"] for row in recent):
        return None  # `no_calls` names the cause: without calls, equal rewards follow
    row = recent[-1]
    return (
        "equal_rewards",
        f"{_steps(recent)} all groups had equal rewards (mean {row['train/reward_mean']:.3g}), "
        "so there was nothing to compare and no weight changed; choose tasks that the model solves sometimes, give "
        "partial rewards, or raise rollout.group_size",
    )


def _no_gradient(row: Row, groups_per_step: int) -> Found:
    if row["train/groups_zero_variance"] >= groups_per_step or row["train/updates_skipped"]:
        return None
    norm = row.get("train/grad_norm", row.get("train/critic_grad_norm", 0.0))  # a step may train the critic alone
    if row["train/trained_tokens"] and norm > 0:
        return None
    if row.get("train/reward_std", 1.0) < EQUAL:  # of an algorithm that compares with more than the group
        return (
            "no_gradient",
            f"all rewards of step {row['step']:.0f} are equal, so there was nothing to compare, and its gradient is "
            "0; choose tasks that the model solves sometimes, or give partial rewards",
        )
    return (
        "no_gradient",
        f"rewards of step {row['step']:.0f} differ, and its gradient is 0 ({row['train/trained_tokens']:.0f} tokens "
        "were trained); see train/calls_without_peers, train/calls_abandoned and train/clip_fraction for the reason",
    )


def _updates_skipped(row: Row) -> Found:
    if not row["train/updates_skipped"]:
        return None
    return (
        "updates_skipped",
        f"{row['train/updates_skipped']:.0f} update(s) of step {row['step']:.0f} were left out because their gradient "
        "was not finite; lower learning_rate, or set trainer.dtype = 'float32'",
    )


def _entropy_collapse(rows: Sequence[Row]) -> Found:
    known = [(row["step"], row["train/entropy"]) for row in rows if "train/entropy" in row]
    if len(known) < 2:
        return None
    (_, before), (step, now) = known[-2:]
    if step != rows[-1]["step"] or now > ENTROPY_SHARE * before or before - now < ENTROPY_FALL:
        return None
    return (
        "entropy_collapse",
        f"the entropy of the policy fell from {before:.2g} to {now:.2g} nats in one step, so it says nearly the same "
        "whatever it is asked; go on from an earlier checkpoint with a lower learning_rate",
    )


def _truncated(recent: Sequence[Row]) -> Found:
    if not recent or any(row["rollout/truncated_share"] < TRUNCATED_SHARE for row in recent):
        return None
    return (
        "truncated",
        f"{_steps(recent)} every reply was cut at max_tokens, so rewards judge unfinished "
        "replies; raise policies.*.sampling.max_tokens, or the limit that the calls ask for",
    )


def _dropped(row: Row, groups_per_step: int) -> Found:
    if row["train/groups_dropped"] < groups_per_step:
        return None
    return (
        "groups_dropped",
        f"{row['train/groups_dropped']:.0f} groups were dropped to fill the {groups_per_step} of step "
        f"{row['step']:.0f}, because too many of their episodes failed or were not scored; `palestra episodes` has the "
        "reasons",
    )


def _discarded(row: Row) -> Found:
    if row["train/episodes_discarded"] < max(row["train/episodes"], 1):
        return None
    return (
        "episodes_discarded",
        f"{row['train/episodes_discarded']:.0f} episodes of step {row['step']:.0f} failed for good or were not scored, "
        f"and {row['train/episodes']:.0f} are trained; `palestra episodes` has the reasons",
    )
