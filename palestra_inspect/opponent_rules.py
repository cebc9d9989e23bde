"""Signs of problems in a game: opponents that improve or are paid alike, one that always wins, turn order.

The numbers are those of two agents, which `opponent_facts` adds to the rows. A sign between opponents may be a success
between cooperating agents, so each rule first checks that the two are opponents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from palestra.doctor.rule import RECENT, Row, Rule, RunHistory, in_each, mean
from palestra.doctor.store_facts import (
    AGENT_REWARD,
    CONSTANT_SUM,
    HIGHEST,
    LOWEST,
    REWARD_SPREAD,
    TOGETHER,
    TWO_AGENTS,
)
from palestra_inspect import rule_episodes

CONSTANT_SHARE = 0.95
RISE = 0.1  # of the spread of rewards
OPPONENT_STEPS = 6
ALIKE, APART = 0.5, -0.5  # correlation of two rewards: -1 of opponents, or near it where a move may be illegal
COLLAPSED_STEPS, BOUND = 10, 0.02
WINDOW, WINDOWS, TURNS = 3, 8, 4
SWING, SURE = 0.25, 4.0


def _of_two(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if TWO_AGENTS in row]


def _agents(rows: Sequence[Row]) -> list[str]:
    return sorted(name for name in rows[-1] if name.startswith(AGENT_REWARD)) if rows else []


def _are_opponents(history: RunHistory) -> bool:
    """Return whether one agent has lost what the other has won, at the start of the run."""
    first = [row for row in history.start if TOGETHER in row][:RECENT]
    return in_each(first, lambda row: row[TOGETHER] <= APART)


def may_be_opponents(history: RunHistory) -> bool:
    """Return whether a policy's reward may depend on another policy that improves too.

    Then a flat or falling reward says little about the policy's own learning. With more or fewer than two agents,
    opponents are unknown.
    """
    first = [row for row in history.start if TOGETHER in row]
    return history.job.rivals and (not first or _are_opponents(history))


def _said(name: str) -> str:
    return name.removeprefix(AGENT_REWARD)


def _opponents_rise(history: RunHistory) -> str | None:
    rows = [row for row in history.rows if TWO_AGENTS in row]
    if len(rows) < OPPONENT_STEPS:
        return None
    first, last = [row for row in history.start if TWO_AGENTS in row][:RECENT], rows[-RECENT:]
    agents = [name for name in first[0] if name.startswith(AGENT_REWARD)] if first else []
    if len(agents) != 2 or not in_each(first, lambda row: row[CONSTANT_SUM] >= CONSTANT_SHARE):
        return None
    # Partners who fail every game at first have a constant sum, too: that of nothing.
    if not _are_opponents(history):
        return None
    least = RISE * max(row[REWARD_SPREAD] for row in (*first, *last))
    moves = [(name, mean(first, name), mean(last, name)) for name in agents]
    if least <= 0 or any(a is None or b is None or b - a <= least for _, a, b in moves):
        return None
    said = " and ".join(f"{name.removeprefix(AGENT_REWARD)} from {a:.3g} to {b:.3g}" for name, a, b in moves)
    return f"the rewards of both opponents rose: {said}; at the start what one won the other lost"


def _paid_alike(history: RunHistory) -> str | None:
    rows = _of_two(history.recent)
    agents = _agents(rows)
    if not history.job.rivals or len(rows) < len(history.recent) or len(agents) != 2:
        return None
    if not in_each(rows, lambda row: row.get(TOGETHER, 0.0) >= ALIKE):
        return None
    means = " and ".join(f"{_said(name)} {mean(rows, name) or 0.0:.3g}" for name in agents)
    return (
        f"what {_said(agents[0])} and {_said(agents[1])} earn goes up and down together (correlation "
        f"{rows[-1][TOGETHER]:.2f}), which is a bug of the rewards if they are meant to be opponents: mean rewards are "
        f"{means}"
    )


def _collapsed(history: RunHistory) -> str | None:
    rows = _of_two(history.last(COLLAPSED_STEPS))
    agents = _agents(rows)
    if not history.job.rivals or len(rows) < COLLAPSED_STEPS or len(agents) != 2 or not _are_opponents(history):
        return None
    known = [*_of_two(history.start), *rows]
    highest, lowest = max(row[HIGHEST] for row in known), min(row[LOWEST] for row in known)
    near = BOUND * (highest - lowest)
    for winner, loser in (agents, agents[::-1]):
        if near > 0 and in_each(rows, lambda row, winner=winner: row[winner] >= highest - near):  # type: ignore[misc]
            return (
                f"{_said(winner)} has won nearly every game of the last {len(rows)} steps (mean reward "
                f"{mean(rows, winner):.3g}; {_said(loser)} {mean(rows, loser):.3g})"
            )
    return None


def _oscillates(history: RunHistory) -> str | None:
    rows = _of_two(history.last(WINDOW * WINDOWS))
    agents = _agents(rows)
    if not history.job.rivals or len(rows) < WINDOW * WINDOWS or len(agents) != 2 or not _are_opponents(history):
        return None
    spread = max(row[HIGHEST] for row in rows) - min(row[LOWEST] for row in rows)
    parts = [rows[start : start + WINDOW] for start in range(0, len(rows), WINDOW)]
    fewest = min(sum(row[TWO_AGENTS] for row in part) for part in parts)
    # The difference of two rewards of one game is at most twice as uncertain as either of them.
    least = max(SWING * spread, SURE * spread / math.sqrt(max(fewest, 1.0)))
    differences = [(mean(part, agents[0]) or 0.0) - (mean(part, agents[1]) or 0.0) for part in parts]
    sides = [difference > 0 for difference in differences if abs(difference) >= least]
    turns = sum(before != after for before, after in itertools.pairwise(sides))
    if least <= 0 or turns < TURNS:
        return None
    return (
        f"in the last {len(rows)} steps {_said(agents[0])} and {_said(agents[1])} took the lead from each other "
        f"{turns} times (differences of their mean rewards: {', '.join(f'{one:+.2g}' for one in differences)})"
    )


_RIVALS = "a role has a pool, or several policies are trained"
_OPPONENTS = f"correlation of the two agents' rewards ≤ {APART:g} in each of the first {RECENT} steps that have one"

OPPONENT_RULES = (
    Rule(
        code="opponents_rise",
        formula=f"{_OPPONENTS}; two agents whose rewards had a constant sum in ≥ {CONSTANT_SHARE:g} of the episodes of "
        f"each of the first {RECENT} steps: the mean of each rose by > {RISE:g} × (highest - lowest reward) to the "
        f"last {RECENT}",
        seen=_opponents_rise,
        means="the game is not zero-sum any more: the players found a way to be paid together, or the reward has a bug",
        remedy="read the episodes in which both won, and make the reward of one the loss of the other",
        shows=rule_episodes.best,
        of_job=True,
    ),
    Rule(
        code="opponents_paid_alike",
        formula=f"{_RIVALS}; two agents, and the correlation of their rewards over the episodes of a step ≥ "
        f"{ALIKE:g} in each of the last {RECENT} steps",
        seen=_paid_alike,
        means="if the agents play against each other, both get the winner's reward, which teaches neither to win; if "
        "they play together, this is as it should be",
        remedy="of opponents, read an episode that one agent has won: what one wins the other has to lose; set "
        "`zero_sum = True` in the environment, which then fails such an episode",
        shows=rule_episodes.best,
        of_job=True,
    ),
    Rule(
        code="opponents_collapse",
        formula=f"{_RIVALS}; {_OPPONENTS}; in each of the last {COLLAPSED_STEPS} steps the mean reward of one is ≥ "
        f"highest reward - {BOUND:g} × (highest - lowest reward)",
        seen=_collapsed,
        means="one side has become too strong: games that are always won or always lost teach neither side",
        remedy="let stronger versions play: pool.choice = 'prioritized', a smaller pool.size or every_steps; train the "
        "losing side alone for a while, or give the sides turns",
        shows=rule_episodes.any_of,
        of_job=True,
    ),
    Rule(
        code="opponents_oscillate",
        formula=f"{_RIVALS}; {_OPPONENTS}; over {WINDOWS} windows of {WINDOW} steps the difference of the mean rewards "
        f"changes its sign ≥ {TURNS} times; windows count with a difference of ≥ {SWING:g} × (highest - lowest reward) "
        f"and ≥ {SURE:g} × that / √(episodes of the window that has the fewest)",
        seen=_oscillates,
        means="each side only learns to beat the other's last version, and forgets how to beat the ones before",
        remedy="play against a pool of past versions, lower learning_rate, or raise algorithm.entropy_coefficient",
        shows=rule_episodes.any_of,
        of_job=True,
    ),
)
