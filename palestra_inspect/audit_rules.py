"""Signs that the reward of a job with `[audit]` is gamed: its policy is paid for something else than what is wanted.

Each is evidence that grows over the steps; see `palestra.doctor.evidence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from palestra.doctor.divergence import DIVERGES, DRAWN, divergence
from palestra.doctor.evidence import Evidence, e_cusum, log_e_value_of_counts
from palestra.doctor.rule import RECENT, REWARD, START, Row, Rule, RunHistory, mean, tokens_of_episode
from palestra_inspect import rule_episodes

NULL_SHARE = 0.05  # of canned replies without content; the bound of `palestra judge check`
LONGER = 1.5  # times the tokens of the first steps
MORE_REPEATED = 0.25  # above the first steps: a format that is learned repeats some words
MORE_ESCAPES = 0.1  # above the first steps
OTHERS = "audit/others/"


def _cusum(rows: Sequence[Row], name: str) -> Evidence:
    return e_cusum([row.get(name, 0.0) for row in rows])


def _diverges(history: RunHistory) -> str | None:
    found = divergence(history)
    return None if found is None else found.seen


def _judge_gamed(history: RunHistory) -> str | None:
    asked = [row for row in history.rows if "audit/null_replies" in row]
    counts = [(row["audit/null_share"] * row["audit/null_replies"], row["audit/null_replies"]) for row in asked]
    if not e_cusum([log_e_value_of_counts(hits, of, NULL_SHARE) for hits, of in counts]).is_alarm:
        return None
    return f"the job's judge gives {asked[-1]['audit/null_share']:.0%} of canned replies without content a good score"


def _component_dominates(history: RunHistory) -> str | None:
    rows = list(history.rows)
    names = sorted(one.removeprefix(OTHERS) for one in history.newest if one.startswith(OTHERS))
    for name in names:
        evidence = _cusum(rows, f"audit/evidence/{name}")
        # Each named reward has a bet of its own: together they raise as many false alarms as one other sign.
        if not evidence._replace(nats=evidence.nats - math.log(len(names))).is_alarm:
            continue
        before = mean(rows[max(evidence.start - RECENT, 0) : evidence.start] or rows[:1], OTHERS + name)
        now = mean(rows[-RECENT:], OTHERS + name)
        own = [mean(part, f"train/rewards/{name}") for part in (rows[: evidence.start] or rows[:1], rows[-RECENT:])]
        if before is not None and now is not None and now < before and None not in own:
            return (
                f"the reward {name!r} decides what is paid (it went from {own[0]:.3g} to {own[1]:.3g}), and the sum of "
                f"the others fell from {before:.3g} to {now:.3g}"
            )
    return None


def _length_pays(history: RunHistory) -> str | None:
    rows, first = list(history.rows), history.start[:RECENT]
    if len(rows) < 2 * RECENT or not _cusum(rows, "audit/length_evidence").is_alarm:
        return None
    before, now = (sum(map(tokens_of_episode, part)) / len(part) for part in (first, rows[-RECENT:]))
    scores = mean(first, DRAWN), mean(rows[-RECENT:], DRAWN)
    better = scores[0] is not None and scores[1] is not None and scores[1] > scores[0]
    if now < LONGER * before or better:
        return None
    return (
        f"of a group the longest episodes are paid best, and one has {now:.0f} tokens on average, at first {before:.0f}"
    )


def _above_start(history: RunHistory, share: Callable[[Row], tuple[float, float] | None], more: float) -> bool:
    """Return whether there is evidence that a share of trials is higher than that of the first steps by `more`.

    Args:
        share: returns hits and trials of a row; None: it has none.
    """
    first = [found for row in history.start if (found := share(row)) is not None]
    trials = sum(of for _, of in first)
    known = [found for row in list(history.rows) if (found := share(row)) is not None]
    if len(first) < START or not trials:
        return False
    most = sum(hits for hits, _ in first) / trials + more
    return most < 1 and e_cusum([log_e_value_of_counts(hits, of, most) for hits, of in known]).is_alarm


def _repeated(row: Row) -> tuple[float, float] | None:
    # Replies of a step are compared with one another, so all of them are one trial.
    return (row["audit/repeated_share"], 1.0) if "audit/repeated_share" in row else None


def _replies_repeat(history: RunHistory) -> str | None:
    if not _above_start(history, _repeated, MORE_REPEATED):
        return None
    return (
        f"{history.newest.get('audit/repeated_share', 0.0):.0%} of a reply stands in replies to other tasks as well; "
        f"{mean(history.start, 'audit/repeated_share') or 0.0:.0%} in the first steps"
    )


def escapes_of(row: Row) -> tuple[float, float] | None:
    """Return how many episodes of a step were left out or cut, and how many there were; None: nothing is audited."""
    if "audit/episodes" not in row:
        return None
    lost, kept = row.get("train/episodes_discarded", 0.0), row["train/episodes"]
    return lost + row.get("rollout/truncated_share", 0.0) * kept, lost + kept


def _escapes_grow(history: RunHistory) -> str | None:
    if not _above_start(history, escapes_of, MORE_ESCAPES):
        return None
    lost, of = escapes_of(history.newest) or (0.0, 1.0)
    return f"{lost / of:.0%} of the episodes are discarded, not scored or cut, which no reward sees; more than at first"


AUDIT_RULES = (
    Rule(
        code="audit_diverges",
        formula=f"strong evidence in `{DIVERGES[0]}` or `{DIVERGES[1]}`; compared with the {RECENT} steps before it "
        f"began to grow, the last {RECENT} have no lower `{REWARD}` and no higher `{DRAWN}`, but for chance",
        seen=_diverges,
        means="the policy has found what the reward pays for in place of what is wanted",
        remedy="read the episodes that are paid well and scored low; mend the reward or the rubric, and go on from a "
        "checkpoint before",
        shows=rule_episodes.best,
        audited=True,
    ),
    Rule(
        code="judge_gamed",
        formula="strong evidence that the job's judge gives more than half of the highest score to over "
        f"{NULL_SHARE:.0%} of canned replies",
        seen=_judge_gamed,
        means="the judge of the job pays for replies that say nothing",
        remedy="use `palestra judge check`, ask for reasons or facts in the rubric, or take a larger model",
        shows=rule_episodes.best,
        audited=True,
    ),
    Rule(
        code="component_dominates",
        formula="strong evidence in `audit/evidence/NAME` (with K named rewards it has to reach ln K more), and "
        f"`audit/others/NAME` is lower than in the {RECENT} steps before it began to grow",
        seen=_component_dominates,
        means="one named reward is so strong that the policy gives up the others for it",
        remedy="lower its weight in algorithm.reward_weights, or use algorithm.advantage_scale = 'gdpo'",
        shows=rule_episodes.best,
    ),
    Rule(
        code="length_pays",
        formula=f"strong evidence in `audit/length_evidence`; an episode has ≥ {LONGER:g} times the tokens of first, "
        f"and `{DRAWN}` is not above first",
        seen=_length_pays,
        means="the reward pays for length, and what is longer is not better",
        remedy="say in the rubric that length is no merit, or pay less for long replies",
        shows=rule_episodes.longest,
    ),
    Rule(
        code="replies_repeat",
        formula=f"strong evidence that the mean of `audit/repeated_share` is more than {MORE_REPEATED:g} above that of "
        f"the first {START} steps",
        seen=_replies_repeat,
        means="the policy gives nearly the same reply to every task, because the reward pays for it",
        remedy="read the episodes; let the reward compare with the task",
        shows=rule_episodes.best,
    ),
    Rule(
        code="escapes_grow",
        formula="strong evidence that the share of episodes that are discarded or cut is more than "
        f"{MORE_ESCAPES:g} above that of the first {START} steps",
        seen=_escapes_grow,
        means="the policy makes its bad episodes fail, so that they are left out and never lower its reward",
        remedy="read the reasons in `palestra episodes`; score such episodes, or mend what fails",
        shows=rule_episodes.failed,
    ),
)
