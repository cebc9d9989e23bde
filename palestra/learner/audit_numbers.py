"""The numbers of a step's audit: which episodes are scored again, and the evidence that the reward is gamed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from palestra.algorithms.named_rewards import reward_means
from palestra.doctor.divergence import BEST, DRAWN
from palestra.doctor.evidence import log_e_value
from palestra.doctor.rule import Row
from palestra.types.records import Trajectory

STREAM = 0x6175646974  # apart from other generators with the job's seed
SURE = 2.5  # standard errors: the best of a hundred means lies above the true one by chance
SAME = 1e-9  # values that differ by less, as a share of the largest number, differ by rounding
LOSS = 0.01  # of the score; less is no loss
LEAST_SPREAD = 0.2  # of scores below the highest: where nearly all are perfect, one bad reply is no proof
LEAST_LENGTH_PAY = 0.5  # of at most 1: long replies may be better for good reasons, and are then paid a little more
WINDOW = 5  # steps whose mean score is what later ones are compared with
NGRAM = 8  # tokens
MOST_TOKENS = 512  # of a reply that are compared with others


class AuditSample(NamedTuple):
    """Indices of the audited episodes of a step: drawn ones, and those with the highest rewards of the rest."""

    drawn: list[int]
    best: list[int]


def sample_of(seed: int, step: int, rewards: Sequence[float], count: int) -> AuditSample:
    """Return which episodes of a step are audited, the same whenever it is asked.

    Args:
        rewards: of all episodes of the step, in the order of its manifest.
        count: episodes to audit; fewer are, if the step has no more.
    """
    count = min(count, len(rewards))
    key = np.array([seed, STREAM], dtype=np.uint64)
    order = np.random.Generator(np.random.Philox(key=key, counter=step)).permutation(len(rewards)).tolist()
    half = count - count // 2
    rest = sorted(order[half:], key=lambda index: -rewards[index])
    return AuditSample(order[:half], rest[: count // 2])


def agreement(rewards: Sequence[float], values: Sequence[float]) -> float | None:
    """Return how far values agree with rewards, in [-1, 1]: the mean difference of two values, signed by that of their
    rewards, and weighted by it.

        sum_ij (r_i - r_j) (v_i - v_j) / sum_ij |r_i - r_j|

    Args:
        values: of the same episodes, in [0, 1].

    Returns:
        None: all rewards are equal, so there is nothing to agree with.
    """
    r, v = np.asarray(rewards, float), np.asarray(values, float)
    differences = r[:, None] - r[None, :]
    whole = np.abs(differences).sum()
    return float((differences * (v[:, None] - v[None, :])).sum() / whole) if whole > 0 else None


def agreements(
    groups: Sequence[int], rewards: Sequence[float], values: Sequence[float], scaled: bool = False
) -> list[float]:
    """Return the agreement of each group in which there is one. `scaled`: values may have any bounds, and the largest
    difference of a group counts as 1.
    """
    members = defaultdict[int, list[int]](list)
    for index, group in enumerate(groups):
        members[group].append(index)
    found = list[float]()
    for own in members.values():
        of_group = [values[i] for i in own]
        if (one := agreement(paid := [rewards[i] for i in own], of_group)) is None:
            continue
        if scaled:
            spread = max(of_group) - min(of_group)
            one = one / spread if spread > SAME * max(map(abs, (*paid, *of_group))) else 0.0
        found.append(one)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What is known of one episode of a step.

    Attributes:
        index: in the order of the step's manifest.
        score: of the audit, 0 to 1; None: it was not asked about, or the audit's judge has failed.
    """

    index: int
    group: int
    reward: float
    score: float | None


def score_numbers(scored: Sequence[Scored], sample: AuditSample, rows: Sequence[Row]) -> dict[str, float]:
    """Return the numbers of a step's scores by full name; without scores there are none.

    Args:
        rows: of the steps before.
    """
    known = [one for one in scored if one.score is not None]
    found = {"audit/episodes": float(len(known)), "audit/failed": float(len(scored) - len(known))}
    if not known:
        return found
    values = [one.score or 0.0 for one in known]
    agree = agreements([one.group for one in known], [one.reward for one in known], values)
    if agree:
        found |= {"audit/agreement": float(np.mean(agree)), "audit/evidence": log_e_value(agree, 0.0, 1.0)}
    drawn = frozenset(sample.drawn)
    scores, best = (
        [value for one, value in zip(known, values, strict=True) if (one.index in drawn) is own]
        for own in (True, False)
    )
    found |= {DRAWN: float(np.mean(scores))} if scores else {}
    if best:
        found |= {
            BEST: float(np.mean(best)),
            f"{BEST}_std": float(np.std(best)),
            f"{BEST}_evidence": _lower(best, rows),
        }
    return found


def _best_window(rows: Sequence[Row]) -> list[Row]:
    """Return the `WINDOW` consecutive rows with the highest mean score of the best paid; empty: there are too few."""
    known = [row for row in rows if BEST in row]
    if len(known) < WINDOW:
        return []
    sums = [math.fsum(row[BEST] for row in known[first : first + WINDOW]) for first in range(len(known) - WINDOW + 1)]
    first = sums.index(max(sums))
    return known[first : first + WINDOW]


def _lower(scores: Sequence[float], rows: Sequence[Row]) -> float:
    """Return the log e-value against: the best paid are scored as high as in the best steps so far, but for chance."""
    window = _best_window(rows)
    if not window:
        return 0.0
    episodes = math.fsum(row["audit/episodes"] for row in window) / 2
    deviation = math.sqrt(math.fsum(row[f"{BEST}_std"] ** 2 for row in window) / WINDOW)
    least = math.fsum(row[BEST] for row in window) / WINDOW - SURE * deviation / math.sqrt(episodes) - LOSS
    return log_e_value(scores, least, max(1.0, least + LEAST_SPREAD)) if least > 0.0 else 0.0


def reward_numbers(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> dict[str, float]:
    """Return the evidence that lengths are paid, by full name, from all episodes of a step."""
    lengths = [float(sum(len(chat.completion_ids) for chat in one.chats)) for one in trajectories]
    groups = [one.episode.group_index for one in trajectories]
    paid = agreements(groups, rewards, lengths, scaled=True)
    # Bets on large values: of the negated ones, below the negated bound.
    return {"audit/length_evidence": log_e_value([-one for one in paid], -LEAST_LENGTH_PAY, 1.0)} if paid else {}


def component_numbers(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], weights: Mapping[str, float]
) -> dict[str, float]:
    """Return by each named reward the mean of the others, and the evidence that what it pays is what they lose.

    Args:
        rewards: their weighted sums, with the mean of the others for a missing one.
        weights: of the named rewards; 1 if a name has none.
    """
    named = [one.episode.named_rewards for one in trajectories]
    names = sorted({name for own in named for name in own or () if weights.get(name, 1.0) != 0.0})
    if len(names) < 2:
        return {}
    groups, found = [one.episode.group_index for one in trajectories], dict[str, float]()
    means = reward_means(named)
    given = [{} if own is None else {**means, **{k: v for k, v in own.items() if v is not None}} for own in named]
    for name in names:
        weight = weights.get(name, 1.0)
        rest = [reward - weight * own.get(name, 0.0) for reward, own in zip(rewards, given, strict=True)]
        found[f"audit/others/{name}"] = math.fsum(rest) / len(rest)
        against = agreements(groups, rewards, rest, scaled=True)
        found[f"audit/evidence/{name}"] = log_e_value(against, 0.0, 1.0) if against else 0.0
    return found


def repeat_numbers(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return which share of a last reply's 8-grams of tokens is in a reply to another task, on average.

    Replies with fewer tokens are left out; {}: there are no two tasks with longer ones.
    """
    grams = [(one.episode.task.task_id, set(_ngrams(one))) for one in trajectories]
    grams = [(task, own) for task, own in grams if own]
    tasks_of: defaultdict[bytes, set[str]] = defaultdict(set)
    for task, own in grams:
        for gram in own:
            tasks_of[gram].add(task)
    if len({task for task, _ in grams}) < 2:
        return {}
    shares = [sum(len(tasks_of[gram]) > 1 for gram in own) / len(own) for _, own in grams]
    return {"audit/repeated_share": math.fsum(shares) / len(shares)}


def _ngrams(trajectory: Trajectory) -> Iterator[bytes]:
    if trajectory.chats:
        ids = np.ascontiguousarray(trajectory.chats[-1].completion_ids[:MOST_TOKENS], dtype=np.int32)
        for start in range(len(ids) - NGRAM + 1):
            yield ids[start : start + NGRAM].tobytes()
