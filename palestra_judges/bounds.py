"""The bounds of a judge that may be trusted, and what a job says at its start of one that is below them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError

# Bounds of what `palestra judge check` measures.
LEAST = {"agreement": 0.4, "position_consistency": 0.8, "self_consistency": 0.8}
MOST = {"null_share": 0.05}
AGREEMENT = "_agreement"  # behind the name of a relative judge's reward: how far its orders of a group agree, 0 to 1
OF_POLICY = "policy "  # before the name of a policy of the job, where it is who judges
IN_WORDS = {
    "agreement": "its agreement with the labels",
    "position_consistency": "its share of equal verdicts when the order is reversed",
    "self_consistency": "its share of equal verdicts when it is asked again",
    "null_share": "its share of empty replies that score",
}


def below(found: Mapping[str, Any]) -> list[str]:
    """Return what is not as good as the bounds, in words.

    Args:
        found: by the names of `LEAST` and `MOST`; None in place of a number: it is not known.
    """
    said = []
    for name, words in IN_WORDS.items():
        value = found.get(name)
        if value is None:
            said.append(f"{words} is not known")
        elif name in LEAST and value < LEAST[name]:
            said.append(f"{words} is {value:.2f}, below {LEAST[name]:g}")
        elif name in MOST and value > MOST[name]:
            said.append(f"{words} is {value:.2f}, above {MOST[name]:g}")
    return said


def doubts(path: Path | None, rubric: str, judge: str) -> list[str]:
    """Return what a user has to know of a judge at the start of a job.

    Args:
        path: of what `palestra judge check` has written; None: nothing is said.
        rubric: digest of what the judge is asked now.
    """
    if path is None:
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        known = found["rubric"], str(found["judge"])
        said = below(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"judge.checked: {path} is no result of `palestra judge check`: {error}") from error
    if known != (rubric, judge.removeprefix(OF_POLICY)):  # a check asks the policy's model by a URL
        said.insert(0, "another judge, or another rubric, was checked")
    return [f"the judge is doubtful: {text} (judge.checked)" for text in said]
