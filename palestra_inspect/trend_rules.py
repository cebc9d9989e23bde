"""Signs over many steps: a falling or unstable reward, entropy, lengths, and a learning rate without effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from palestra.doctor.rule import (
    KEPT,
    RECENT,
    REWARD,
    START,
    STD,
    VALIDATION,
    Row,
    Rule,
    RunHistory,
    in_each,
    mean,
    reward_error,
    tokens_of_episode,
)
from palestra_inspect import rule_episodes
from palestra_inspect.opponent_rules import may_be_opponents

ENTROPY = "train/entropy"
SURE = 4.0  # standard errors; of a hundred means of three steps, chance brings none so far from the best
LOST_SHARE = 0.5  # of what a run has gained
FALLEN_SHARE, FALLEN_ERRORS = 0.25, 2.5  # of what validations have gained, and standard errors
SWING_STEPS, SWINGS, SWING_RANGE = 24, 4, 0.5
ENTROPY_LEFT = 0.05  # share of the entropy of the first steps
ENTROPY_NONE = 0.03  # share of it, and nats: with so little left nothing new is tried, however high the reward is
LONGER, LONGER_TOKENS = 2.0, 16.0  # times the tokens of the first steps, and tokens more: two words more are no sign
IDLE_STEPS, IDLE_ERRORS = 30, 2.5


def _not_better(history: RunHistory, recent: Sequence[Row]) -> bool:
    """Return whether the reward of the last steps exceeds that of the first ones by no more than one error."""
    first = history.start[:RECENT]
    before, now = mean(first, REWARD), mean(recent, REWARD)
    return before is not None and now is not None and now <= before + reward_error(history, [*first, *recent], RECENT)


def _reward_collapse(history: RunHistory) -> str | None:
    rows = list(history.rows)
    if len(rows) < 2 * RECENT or may_be_opponents(history):
        return None
    recent, earlier = rows[-RECENT:], rows[:-RECENT]
    now = mean(recent, REWARD) or 0.0
    rewards = [row[REWARD] for row in earlier]
    end = max(range(RECENT, len(earlier) + 1), key=lambda end: sum(rewards[end - RECENT : end]))
    best_rows = earlier[end - RECENT : end]
    best, first = mean(best_rows, REWARD) or 0.0, mean(history.start[:RECENT], REWARD) or 0.0
    enough = max(LOST_SHARE * (best - first), SURE * reward_error(history, [*best_rows, *recent], RECENT))
    if best <= now or best - now <= enough:
        return None
    return (
        f"the mean reward of {RECENT} steps was {best:.3g} at step {best_rows[-1]['step']:.0f}, and is {now:.3g} now; "
        f"the run began with {first:.3g}"
    )


def improves(history: RunHistory) -> bool:
    """Return whether the run improves: by its validations if there are several, otherwise by its rewards."""
    known = [row[VALIDATION] for row in history.validations]
    if len(known) > 1:
        return known[-1] > known[0] and known[-1] - known[0] > LOST_SHARE * (max(known) - known[0])
    count = min(RECENT, len(history.rows) // 2)
    first, recent = history.start[:count], history.last(count) if count else []
    before, now = mean(first, REWARD), mean(recent, REWARD)
    if before is None or now is None:
        return False
    error = reward_error(history, [*first, *recent], count) if count == RECENT else 0.0  # any rise counts at first
    rewards = [row[REWARD] for row in history.rows]
    best = max(sum(rewards[end - count : end]) / count for end in range(count, len(rewards) + 1))
    return now - before > max(error, LOST_SHARE * (best - before))


def _validation_falls(history: RunHistory) -> str | None:
    known = list(history.validations)
    ended = history.newest["step"] >= history.job.steps
    count = 1 if ended and known and known[-1] is history.newest else 2  # no other evaluation will follow
    if len(known) <= count or may_be_opponents(history):
        return None
    best, newest = max(known[:-count], key=lambda row: row[VALIDATION]), known[-count:]
    deviation = max(row.get(STD, 0.0) for row in (*history.start, *history.rows))
    scored = min(row.get("validation/scored", history.job.groups_per_step) for row in (best, *newest))
    least = max(
        FALLEN_SHARE * (best[VALIDATION] - known[0][VALIDATION]),
        FALLEN_ERRORS * deviation * math.sqrt(2 / max(scored, 1)),
    )
    if best[VALIDATION] - max(row[VALIDATION] for row in newest) <= least:
        return None
    return (
        f"validation was {best[VALIDATION]:.3g} after step {best['step']:.0f}, and is {newest[-1][VALIDATION]:.3g} "
        f"after step {newest[-1]['step']:.0f}; the mean reward of training is {history.newest[REWARD]:.3g} now"
    )


def _reward_oscillates(history: RunHistory) -> str | None:
    rows = history.last(min(SWING_STEPS, len(history.rows)))
    values = [row[REWARD] for row in rows]
    if len(values) <= SWINGS:
        return None
    known = [row[REWARD] for row in history.rows]
    least = max(SURE * reward_error(history, rows, 1), SWING_RANGE * (max(known) - min(known)))
    if least <= 0 or (swings := _swings(values, least)) < SWINGS:
        return None
    return (
        f"in the last {len(values)} steps the mean reward swung {swings} times by {least:.2g} or more, between "
        f"{min(values):.3g} and {max(values):.3g}"
    )


def _swings(values: Sequence[float], least: float) -> int:
    """Return how often a series turns after a move of a least size."""
    swings, up, low, high = 0, None, values[0], values[0]
    for value in values:
        low, high = min(low, value), max(high, value)
        if up is not True and value - low >= least:
            swings, up, high = swings + 1, True, value
        elif up is not False and high - value >= least:
            swings, up, low = swings + 1, False, value
    return swings


def _entropy_lost(history: RunHistory) -> str | None:
    recent, first = history.recent, history.start[:RECENT]
    if len(history.rows) < 2 * RECENT or not in_each(recent, lambda row: ENTROPY in row):
        return None
    before, now = mean(first, ENTROPY), mean(recent, ENTROPY)
    if before is None or now is None or now > ENTROPY_LEFT * before:
        return None
    seen = f"the entropy of the policy fell from {before:.2g} to {now:.2g} nats, and its reward is"
    if _not_better(history, recent):
        return f"{seen} no higher than at the start ({mean(recent, REWARD):.3g})"
    long = mean(history.last(START), ENTROPY)  # a policy that learns is sure of some steps' answers, too
    gone = long is not None and long <= min(ENTROPY_NONE, ENTROPY_NONE * before)
    return f"{seen} {mean(recent, REWARD):.3g}" if gone else None


def _lengths_run_away(history: RunHistory) -> str | None:
    recent, first = history.recent, history.start[:RECENT]
    if len(history.rows) < 2 * RECENT or not in_each(recent, lambda row: "rollout/completion_tokens" in row):
        return None
    before, now = _average(first, tokens_of_episode), _average(recent, tokens_of_episode)
    if now < max(LONGER * before, before + LONGER_TOKENS) or not _not_better(history, recent):
        return None
    return (
        f"an episode has {now:.0f} sampled tokens on average, at the start it had {before:.0f}, and the reward is no "
        f"higher ({mean(recent, REWARD):.3g})"
    )


def _learning_rate_idle(history: RunHistory) -> str | None:
    recent = history.last(RECENT)
    if history.newest["step"] < history.job.steps and in_each(
        recent, lambda row: row.get("train/learning_rate") == 0.0 and row.get("train/grad_norm", 0.0) > 0
    ):
        return f"the learning rate of the last {len(recent)} steps was 0, so no weight changed"
    last = history.last(IDLE_STEPS)[-START:]
    if may_be_opponents(history) or not in_each(
        [*history.start, *last], lambda row: ENTROPY in row and row.get("train/grad_norm", 0.0) > 0
    ):
        return None
    series: tuple[Callable[[Row], float], ...] = (lambda row: row[REWARD], lambda row: row[ENTROPY], tokens_of_episode)
    if not last or any(_moved(history.start, last, value) for value in series):
        return None
    return (
        f"after {history.newest['step']:.0f} steps with gradients, reward ({mean(last, REWARD):.3g}), entropy "
        f"({mean(last, ENTROPY):.2g}) and lengths are those of the first {START} steps; the learning rate is "
        f"{last[-1].get('train/learning_rate', 0.0):.2g}"
    )


def _moved(first: Sequence[Row], last: Sequence[Row], value: Callable[[Row], float]) -> bool:
    """Return whether two parts of a run differ by more than the steps of each from one to the next."""
    before, now = [value(row) for row in first], [value(row) for row in last]
    difference = abs(sum(now) / len(now) - sum(before) / len(before))
    return difference > IDLE_ERRORS * math.sqrt(_variance(before) / len(before) + _variance(now) / len(now))


def _variance(values: Sequence[float]) -> float:
    """Return the variance of noise around a trend (von Neumann 1941, "Distribution of the ratio of the mean square
    successive difference to the variance").
    """
    return sum((after - before) ** 2 for before, after in pairwise(values)) / (2 * max(len(values) - 1, 1))


def _average(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return sum(map(value, rows)) / len(rows)


_FAR = f"{SURE:g} σ/√({RECENT} × `rollout.groups_per_step`)"
_SOLE = "the policy does not play against one that is trained as well, nor against its past"
_NO_BETTER = f"`train/reward_mean` not above that of the first {RECENT} by more than a standard error"

TREND_RULES = (
    Rule(
        code="reward_collapse",
        formula=f"means of {RECENT} steps of `train/reward_mean`: best - now > {LOST_SHARE:g} × (best - first), and > "
        f"{_FAR}; σ is the largest `train/reward_std` of these steps; {_SOLE}",
        seen=_reward_collapse,
        means="an update broke the policy, it found a way that the reward stopped paying, or the tasks became harder",
        remedy="go on from the checkpoint before the fall with a lower learning_rate or with algorithm.kl, and read "
        "the episodes of the lowest reward",
        shows=rule_episodes.worst,
    ),
    Rule(
        code="validation_falls",
        formula=f"the two newest `{VALIDATION}`, or that after the last step, are below the best before by > "
        f"{FALLEN_SHARE:g} × (best - first) and > {FALLEN_ERRORS:g} σ √(2/`validation/scored`); σ is the largest "
        f"`{STD}`; {_SOLE}",
        seen=_validation_falls,
        means="the policy gets worse at tasks that it does not train on: it learns these tasks by heart, or a way to "
        "be paid without solving them",
        remedy="use the checkpoint of the best validation; train on more tasks, with a lower learning_rate or "
        "algorithm.kl",
        shows=rule_episodes.none_of,
    ),
    Rule(
        code="reward_oscillates",
        formula=f"in the last {SWING_STEPS} steps `train/reward_mean` moves ≥ {SWINGS} times, by turns up and down, by "
        f"≥ {SURE:g} σ/√`rollout.groups_per_step` and ≥ {SWING_RANGE:g} of its range in the newest {KEPT} rows; σ is "
        "the largest `train/reward_std` of these steps",
        seen=_reward_oscillates,
        means="updates overshoot, or the tasks of consecutive steps are of different kinds",
        remedy="lower learning_rate, raise rollout.groups_per_step, or mix the tasks of a step",
        shows=rule_episodes.worst,
    ),
    Rule(
        code="entropy_lost",
        formula=f"means of {RECENT} steps of `train/entropy`: now ≤ {ENTROPY_LEFT:g} × first, and {_NO_BETTER}; "
        f"or that of {START} steps ≤ {ENTROPY_NONE:g} × first and ≤ {ENTROPY_NONE:g} nats",
        seen=_entropy_lost,
        means="the policy became sure of its answers, the wrong ones as well, so nothing new will be tried",
        remedy="go on from an earlier checkpoint with algorithm.entropy_coefficient, a lower learning_rate or "
        "algorithm.kl",
        shows=rule_episodes.worst,
    ),
    Rule(
        code="lengths_run_away",
        formula="means of "
        f"{RECENT} steps of `rollout/completion_tokens` / `train/episodes`: now ≥ {LONGER:g} × first and ≥ first + "
        f"{LONGER_TOKENS:g}, and {_NO_BETTER}",
        seen=_lengths_run_away,
        means="the loss or the reward pays for length, or the model has forgotten how to end",
        remedy="read the longest episodes; use algorithm.loss_agg_mode = 'token-mean', dr_grpo or dapo's overlong "
        "penalty, or limit max_tokens",
        shows=rule_episodes.longest,
    ),
    Rule(
        code="learning_rate_idle",
        formula=f"`train/learning_rate` = 0 in each of {RECENT} steps before the last; or from step {IDLE_STEPS} on, "
        f"with gradients in all of them, reward, entropy and tokens of an episode in the last {START} steps differ "
        f"from those of the first {START} by ≤ {IDLE_ERRORS:g} standard errors of noise from step to step, and {_SOLE}",
        seen=_learning_rate_idle,
        means="the learning rate is too small for the precision of the weights, or the schedule ended early",
        remedy="raise learning_rate tenfold, look at its schedule, or train with trainer.dtype = 'float32'",
        shows=rule_episodes.any_of,
    ),
)
