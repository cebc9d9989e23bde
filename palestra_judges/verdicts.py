"""Reads what a judge has answered, strictly: one JSON object, and nothing that a judged text may have said."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from palestra.errors import JudgeFailed

LONGEST_REASON = 2000  # characters that are kept
THOUGHT = "</think>"
MOST_THOUGHTS = 100  # ends of thoughts that are looked behind


def read_answer(text: str, question_id: str) -> dict[str, Any]:
    """Return the JSON object that is the whole of an answer, apart from a thought before it and a fence around it.

    Raises:
        JudgeFailed: it is something else, or does not have the question's id.
    """
    # A judge may quote what it has read, the end of a thought among it: in its thought, or in its reason.
    starts = [0, *(found.end() for found in islice(re.finditer(THOUGHT, text), MOST_THOUGHTS))]
    for start in starts:
        body = text[start:].strip()
        if body.startswith("```") and body.endswith("```"):
            body = body.removesuffix("```").partition("\n")[2].strip()
        if not body.startswith("{"):
            continue
        try:
            found = json.loads(body, object_pairs_hook=_once)
        except (ValueError, RecursionError):
            continue
        if found.get("id") != question_id:
            raise JudgeFailed("the judge's answer does not have the id of its question")
        return dict(found)
    raise JudgeFailed(f"the judge's answer is no JSON object: {text[:80]!r}")


def read_choices(text: str, question_id: str, choices: Mapping[str, Sequence[str]]) -> dict[str, tuple[float, str]]:
    """Return the score and the reason of each criterion.

    Args:
        choices: of each criterion, by its name, from worst (0) to best (1).

    Raises:
        JudgeFailed: not each criterion has exactly one verdict, or one has another choice.
    """
    found: dict[str, tuple[float, str]] = {}
    entries = read_answer(text, question_id).get("criteria")
    for entry in entries if isinstance(entries, list) else []:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in choices or name in found:
            raise JudgeFailed(f"the judge speaks of the criterion {str(name)[:80]!r}, which is not there, or twice")
        known = [choice.strip().casefold() for choice in choices[name]]
        chosen = str(entry.get("choice")).strip().casefold()
        if chosen not in known:
            raise JudgeFailed(f"the judge chose {chosen[:80]!r} for {name!r}, which is none of its choices")
        found[name] = known.index(chosen) / (len(known) - 1), _reason(entry.get("reason", ""))
    if left := [name for name in choices if name not in found]:
        raise JudgeFailed(f"the judge left out the criterion {left[0]!r}")
    return found


def read_ranking(text: str, question_id: str, ids: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the ids from best to worst, and the reasons by id.

    Raises:
        JudgeFailed: the ranking has not exactly these ids, each once.
    """
    said = read_answer(text, question_id)
    ranking = said.get("ranking")
    if not isinstance(ranking, list) or not all(isinstance(one, str) for one in ranking):
        raise JudgeFailed("the judge gave no ranking")
    if invented := [one for one in ranking if one not in ids]:
        raise JudgeFailed(f"the judge ranked {invented[0][:80]!r}, which is no id of a reply")
    if sorted(ranking) != sorted(ids):
        raise JudgeFailed(f"the judge ranked {len(set(ranking))} of {len(ids)} replies, or one of them twice")
    reasons = said.get("reasons")
    given = reasons if isinstance(reasons, dict) else {}
    return ranking, {one: _reason(given[one]) for one in ids if one in given}


def _reason(given: Any) -> str:
    """Return a reason as it is kept: as text that UTF-8 has, which no half of a surrogate pair is."""
    return str(given)[:LONGEST_REASON].encode(errors="replace").decode()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; refuse a key that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
