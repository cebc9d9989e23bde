"""Where a job with `[audit]` is paid for something else than what its audit scores."""

from __future__ import annotations

import math
from typing import NamedTuple

from palestra.doctor.evidence import e_cusum
from palestra.doctor.rule import RECENT, REWARD, RunHistory, mean, reward_error

DRAWN, BEST = "audit/score", "audit/score_best"  # means of the audit's scores of drawn episodes, and of the best paid
DIVERGES = ("audit/evidence", f"{BEST}_evidence")


class Divergence(NamedTuple):
    """Where rewards and audit diverge.

    Attributes:
        since: step from which on they are likely to.
    """

    since: int
    seen: str


def divergence(history: RunHistory) -> Divergence | None:
    """Return where the reward holds or rises, and the audit's scores do not rise or fall; None: nowhere."""
    rows = list(history.rows)
    evidence = max((e_cusum([row.get(name, 0.0) for row in rows]) for name in DIVERGES), key=lambda one: one.nats)
    if not evidence.is_alarm:
        return None
    recent, before = rows[-RECENT:], rows[max(evidence.start - RECENT, 0) : evidence.start] or rows[:1]
    paid, paid_before = mean(recent, REWARD) or 0.0, mean(before, REWARD) or 0.0
    if paid < paid_before - reward_error(history, [*before, *recent], len(recent)):
        return None  # both fall: the policy broke, or the tasks became harder
    now, first = mean(recent, DRAWN), mean(before, DRAWN)
    if now is None or first is None:
        return None
    error = 0.5 / math.sqrt(max(sum(row.get("audit/episodes", 0.0) for row in recent) / 2, 1.0))
    if now > first + error:
        return None
    since = int(rows[evidence.start]["step"])
    return Divergence(
        since,
        f"since about step {since} the reward does not pay for what the audit scores: the mean reward went from "
        f"{paid_before:.3g} to {paid:.3g}, the audit's mean score from {first:.2f} to {now:.2f}, and of the best paid "
        f"episodes it is {mean(recent, BEST) or 0.0:.2f}",
    )
