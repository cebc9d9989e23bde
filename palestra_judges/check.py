"""Compares a judge with labels of people, with itself, and with replies that say nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from palestra.client.task_files import read_task_file
from palestra.envs.judge import weighted_share
from palestra.errors import ConfigError, JudgeFailed
from palestra.runtime.scores import t_quantile
from palestra.waiting import together
from palestra_judges.bounds import below
from palestra_judges.config import Criterion, Relative, Rubric
from palestra_judges.questions import NULLS, null_reply
from palestra_judges.relative import Entry, RelativeJudge
from palestra_judges.rubric import RubricJudge

NULL_QUESTIONS = 4  # of the labels, with each of which every null reply is judged
S = TypeVar("S")
T = TypeVar("T")


async def check_judge(config: Rubric | Relative, judge: RubricJudge | RelativeJudge, labels: Path) -> dict[str, Any]:
    """Return what a judge is worth, by the names of `bounds`, and of each criterion.

    Args:
        labels: JSON lines. Of a rubric `question`, `reply` and `labels` (a choice by criterion); of a relative judge
            `question`, `replies` and `ranks` (one for each reply, 1 for the best).

    Raises:
        JudgeFailed: the judge gives a verdict on no label.
    """
    rows = read_task_file(labels)
    if len(rows) < 2:
        raise ConfigError(f"{labels} has {len(rows)} labels; about 50 say something, and 200 are better")
    await judge.open()
    try:
        if isinstance(config, Rubric) and isinstance(judge, RubricJudge):
            found = await _rubric(config, judge, [_labelled(labels, n, row, config) for n, row in enumerate(rows, 1)])
        else:
            assert isinstance(config, Relative)
            assert isinstance(judge, RelativeJudge)
            found = await _relative(config, judge, [_ranked(labels, n, row) for n, row in enumerate(rows, 1)])
    finally:
        await judge.close()
    found = {"judge": judge.version, "rubric": judge.rubric, "labels": len(rows)} | found
    return found | {"below": below(found)}


def _labelled(path: Path, number: int, row: Mapping[str, Any], config: Rubric) -> dict[str, Any]:
    """Return a label of a rubric, with the number of each choice."""
    _strings(path, number, row, "question", "reply")
    given = row.get("labels")
    names = [one.name for one in config.criteria]
    if not isinstance(given, dict) or sorted(given) != sorted(names):
        raise ConfigError(f"{path}, line {number}: `labels` has a choice for each of {', '.join(names)}, not {given!r}")
    for one in config.criteria:
        if given[one.name] not in one.choices:
            raise ConfigError(
                f"{path}, line {number}: {given[one.name]!r} is no choice of {one.name!r} ({', '.join(one.choices)})"
            )
    return {**row, "labels": {one.name: one.choices.index(given[one.name]) for one in config.criteria}}


def _ranked(path: Path, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a label of a relative judge."""
    _strings(path, number, row, "question")
    replies, ranks = row.get("replies"), row.get("ranks")
    if not isinstance(replies, list) or len(replies) < 2 or not all(isinstance(one, str) for one in replies):
        raise ConfigError(f"{path}, line {number}: `replies` is a list of at least two texts")
    if len(set(replies)) < len(replies):
        raise ConfigError(f"{path}, line {number}: two `replies` are equal")
    given = ranks if isinstance(ranks, list) else []
    if len(given) != len(replies) or not all(type(one) in (int, float) and math.isfinite(one) for one in given):
        raise ConfigError(f"{path}, line {number}: `ranks` has a number for each of the {len(replies)} replies")
    return dict(row)


def _strings(path: Path, number: int, row: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if not isinstance(row.get(key), str):
            raise ConfigError(f"{path}, line {number}: `{key}` is not a text")


async def _rubric(config: Rubric, judge: RubricJudge, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    async def choices(row: Mapping[str, Any], **how: Any) -> dict[str, int]:
        scores = (await judge.ask(_shown(row["question"], row["reply"]), "", **how)).scores[""]
        return {one.name: round(scores[one.name] * (len(one.choices) - 1)) for one in config.criteria}

    plain = await _each(rows, choices)
    mirrored = await _each(rows, lambda row: choices(row, mirrored=True))
    again = await _each(rows, lambda row: choices(row, repeat=1))
    nulls = [
        {"question": row["question"], "reply": null_reply(null, row["question"])}
        for row in rows[:NULL_QUESTIONS]
        for null in NULLS
    ]
    judged = await _each(nulls, choices)
    known, found = _both(rows, plain)
    criteria = {one.name: _criterion(one, [row["labels"][one.name] for row in known], found) for one in config.criteria}
    kappas = [one["kappa"] for one in criteria.values() if one["kappa"] is not None]
    return {
        "agreement": min(kappas, default=None),
        "position_consistency": _equal(*_both(plain, mirrored)),
        "self_consistency": _equal(*_both(plain, again)),
        "null_share": _number(_mean([float(_share(config, one) > 0.5) for one in judged if one is not None])),
        "failed": _failed(plain, mirrored, again, judged),
        "criteria": criteria,
    }


def _criterion(criterion: Criterion, labels: Sequence[int], judged: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return the agreement of one criterion with the labels."""
    found, size = [one[criterion.name] for one in judged], len(criterion.choices)

    def resampled(places: Sequence[int]) -> float:
        return kappa([labels[place] for place in places], [found[place] for place in places], size)

    low, high = interval(len(labels), resampled)
    return {
        "equal": float(np.mean([a == b for a, b in zip(labels, found, strict=True)])),
        "kappa": _number(kappa(labels, found, size)),
        "kappa_interval": [_number(low), _number(high)],
        "tau_b": _number(tau_b(labels, found)),
    }


async def _relative(config: Relative, judge: RelativeJudge, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    async def scores(row: Mapping[str, Any], mirrored: bool = False, repeat: int = 0) -> list[float]:
        entries: list[Entry] = [
            ({"reply": {"role": "assistant", "text": text}}, (str(n),)) for n, text in enumerate(row["replies"])
        ]
        order = judge.orders(entries, 0)[0]
        verdict = await judge.ask({"question": row["question"]}, order[::-1] if mirrored else order, repeat)
        return [verdict.scores[str(n)][config.name] for n in range(len(entries))]

    plain = await _each(rows, scores)
    mirrored = await _each(rows, lambda row: scores(row, mirrored=True))
    again = await _each(rows, lambda row: scores(row, repeat=1))
    means = [
        None if a is None or b is None else [x + y for x, y in zip(a, b, strict=True)]
        for a, b in zip(plain, mirrored, strict=True)
    ]
    # A judge that finds all alike agrees with no order; a label without an order says nothing.
    taus = [
        0.0 if len(set(one)) == 1 and len(set(row["ranks"])) > 1 else tau_b([-rank for rank in row["ranks"]], one)
        for row, one in zip(*_both(rows, means), strict=True)
    ]
    nulls = [
        {**row, "replies": [*row["replies"], text]}
        for row in rows[:NULL_QUESTIONS]
        for null in NULLS
        if (text := null_reply(null, row["question"])) not in row["replies"]
    ]
    judged = await _each(nulls, scores)
    known = [tau for tau in taus if math.isfinite(tau)]
    low, high = interval(len(known), lambda places: _mean([known[place] for place in places]))
    return {
        "agreement": _number(_mean(taus)),
        "agreement_interval": [_number(low), _number(high)],
        "position_consistency": _same_pairs(*_both(plain, mirrored)),
        "self_consistency": _same_pairs(*_both(plain, again)),
        "null_share": _number(_mean([float(one[-1] > 0.5) for one in judged if one is not None])),
        "failed": _failed(plain, mirrored, again, judged),
    }


def _shown(question: str, reply: str) -> dict[str, Any]:
    """Return data as that of an episode looks; see `work_of`."""
    return {"question": question, "reply": {"role": "assistant", "text": reply}}


async def _each(
    rows: Sequence[Mapping[str, Any]], ask: Callable[[Mapping[str, Any]], Coroutine[Any, Any, T]]
) -> list[T | None]:
    """Return what the judge says of each row; None: it has failed."""

    async def one(row: Mapping[str, Any]) -> T | None:
        try:
            return await ask(row)
        except JudgeFailed:
            return None

    return await together(*(one(row) for row in rows))


def _both(first: Sequence[S | None], second: Sequence[T | None]) -> tuple[list[S], list[T]]:
    """Return the pairs of which both are known."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        raise JudgeFailed("the judge gave a verdict on no label")
    return [a for a, _ in pairs], [b for _, b in pairs]


def _failed(*judged: Sequence[Any]) -> float:
    """Return the share of questions that got no verdict."""
    found = [one is None for part in judged for one in part]
    return sum(found) / len(found)


def _equal(first: Sequence[Mapping[str, int]], second: Sequence[Mapping[str, int]]) -> float:
    """Return the share of criteria that have the same choice."""
    return float(np.mean([a[name] == b[name] for a, b in zip(first, second, strict=True) for name in a]))


def _same_pairs(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """Return the share of pairs of replies that two rankings order alike."""
    same = [
        (a[i] > a[j]) == (b[i] > b[j])
        for a, b in zip(first, second, strict=True)
        for i in range(len(a))
        for j in range(i)
    ]
    return float(np.mean(same))


def _share(config: Rubric, choices: Mapping[str, int]) -> float:
    """Return what a work has of the largest weighted sum; 0 without weights."""
    scores = {one.name: choices[one.name] / (len(one.choices) - 1) for one in config.criteria}
    return weighted_share(scores, config.reward_weights) if any(config.reward_weights.values()) else 0.0


def _mean(values: Sequence[float]) -> float:
    """Return the mean of what is known; NaN if nothing is."""
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else float("nan")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


RESAMPLED = 1000


def kappa(labels: Sequence[int], found: Sequence[int], choices: int) -> float:
    """Return Cohen's kappa; with more than two ordered choices the quadratically weighted one.

    Args:
        labels, found: [N] numbers of choices.

    Returns:
        NaN if both have only one and the same choice, so that nothing can be said.
    """
    counts = np.zeros((choices, choices))
    np.add.at(counts, (np.asarray(labels), np.asarray(found)), 1)
    observed = counts / counts.sum()
    expected = np.outer(observed.sum(1), observed.sum(0))
    places = np.arange(choices)
    distance = (places[:, None] - places[None, :]) ** 2
    chance = float((distance * expected).sum())
    return 1 - float((distance * observed).sum()) / chance if chance else float("nan")


def tau_b(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau-b of two orders of the same things; NaN if one has ties only."""
    a, b = np.asarray(first), np.asarray(second)
    signs_a, signs_b = np.sign(a[:, None] - a[None, :]), np.sign(b[:, None] - b[None, :])
    scale = np.sqrt((signs_a**2).sum() * (signs_b**2).sum())
    return float((signs_a * signs_b).sum() / scale) if scale else float("nan")


def interval(count: int, statistic: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    """Return the 95 % interval of a statistic of `count` things, of which it is given the indices; NaN: it is unknown.

    It is Student's t interval with the standard error of the bootstrap, times sqrt(n / (n - 1)): of few things the
    quantiles of the bootstrap are too narrow (Efron and Tibshirani 1993, An Introduction to the Bootstrap, 12.5).
    """
    if count < 2:
        return float("nan"), float("nan")
    draw = np.random.default_rng(0)
    values = [statistic(draw.integers(0, count, count).tolist()) for _ in range(RESAMPLED)]
    finite = [value for value in values if np.isfinite(value)]
    found, error = statistic(range(count)), float(np.std(finite)) if finite else 0.0
    if not math.isfinite(found) or error == 0.0:
        return float("nan"), float("nan")
    half = t_quantile(0.95, count - 1) * error * math.sqrt(count / (count - 1))
    return max(found - half, -1.0), min(found + half, 1.0)
