"""Questions of the package `reasoning-gym`, generated from a seed and scored by the package's own scorers.

`countdown` and others call `eval` or sympy's `parse_expr` with a model's text, in the job's process. An answer that
could do more than state numbers or a list scores 0, without being evaluated.

`reasoning-gym` is an optional dependency, imported only when an environment is created.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping
from typing import Any

from palestra.envs.arithmetic import is_number, last_number
from palestra.envs.catalog import imported
from palestra.envs.environment import Environment
from palestra.envs.tasks import Split, draw_tasks, final_answers
from palestra.errors import ConfigError

LONGEST = 2000  # characters
_ARITHMETIC = re.compile(r"[-+*/().\d\s]*")
_LIST = re.compile(r"[-\[\],'\"\w\s.|]*")
_FORMULA = re.compile(r"[-+*/()^.,\w\s]*")
_NAME = re.compile(r"[^\W\d]\w*")
_FUNCTIONS = {
    "log",
    "ln",
    "sqrt",
    "exp",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "pi",
    "Integral",
}
# What may follow `**` or `^`: a small number, a letter, or a small fraction; towers of powers do not end.
_POWER = re.compile(
    r"(?:\*\*|\^)\s*(?:-?\d{1,2}|[a-zA-Z]|\(\s*-?\s*(?:\d{0,2}\s*\*?\s*[a-zA-Z]|\d{1,2}(?:\s*/\s*\d{1,2})?)\s*\))(?![\w.]|\s*(?:\*\*|\^))"
)
_BY_DATASET = {
    **dict.fromkeys(("countdown", "puzzle24"), "arithmetic"),
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), "list"),
    **dict.fromkeys(("simple_integration", "intermediate_integration", "polynomial_multiplication"), "formula"),
}


def may_be_scored(dataset: str, answer: str) -> bool:
    """Return whether an answer may reach the scorer of a data set."""
    kind = _BY_DATASET.get(dataset)
    if kind is None:
        return True
    if len(answer) > LONGEST:
        return False
    if kind == "arithmetic":
        return _ARITHMETIC.fullmatch(answer) is not None and "**" not in answer
    if kind == "list":  # without parentheses nothing is called; a comprehension may take for ever
        return _LIST.fullmatch(answer) is not None and re.search(r"\bfor\b|\.\s*[^\W\d]", answer) is None
    return _is_formula(answer)


def _is_formula(answer: str) -> bool:
    names = _NAME.findall(re.sub(r"(?<=\d)(?=[^\W\d])", " ", answer))  # 2x is 2 times x
    return (
        _FORMULA.fullmatch(answer) is not None
        and all(len(name) == 1 or name in _FUNCTIONS for name in names)
        and re.search(r"\.\s*[^\W\d]", answer) is None  # no attribute
        and len(re.findall(r"\*\*|\^", answer)) == len(_POWER.findall(answer))
        and len(re.findall(r"\)\s*(?:\*\*|\^)", answer)) <= 2  # powers of powers
    )


class ReasoningEnvironment(Environment):
    """One question of a data set of `reasoning-gym`, such as `countdown` or `gsm_symbolic`, and one answer.

    A task has the key `seed`, from which the question is generated. The answer is the end of the reply, which may begin
    with working: see `final_answers`.
    """

    reusable = True

    def __init__(self, dataset: str, *, system: str | None = None, **settings: Any) -> None:
        """Create the environment of one data set.

        Args:
            dataset: name of the data set in `reasoning-gym`.
            system: system message of each conversation, if any.
            **settings: settings of the data set.

        Raises:
            ConfigError: `reasoning-gym` is not installed, or has no such data set, or the data set has no such setting.
        """
        self._make, self._dataset, self._settings = (
            imported("reasoning_gym", "reasoning-gym").create_dataset,
            dataset,
            settings,
        )
        try:
            self._make(dataset, size=1, seed=0, **settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym can't make {dataset!r} with {settings}: {error}") from error
        self.system = system
        self._source: Any = None
        self._entry: Any = None

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the question that the task's seed generates, and the expected answer as information for people."""
        self._source = self._make(self._dataset, size=1, seed=int(task["seed"]), **self._settings)
        self._entry = self._source[0]
        return str(self._entry["question"]), {"answer": self._entry["answer"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the end of the reply with the data set's scorer, from 0 to 1, and end the episode.

        If a scorer fails on a reply, the reward is 0: several expect a form that a reply need not have.
        """
        expected = str(self._entry["answer"] or "")
        source = self._entry.get("metadata", {}).get("source_dataset", self._dataset)  # of `composite`, one of several
        scores, info = [0.0], dict[str, Any]()
        for answer in final_answers(action, expected.strip().count("\n") + 1):
            if is_number(expected) and answer != expected and (number := last_number(answer)) is not None:
                answer = f"{number:f}"  # some scorers take the first one, or none with commas
            if not may_be_scored(source, answer):
                info["unreadable"] = "the answer has more than a formula or a list"
                continue
            try:
                scores.append(float(self._source.score_answer(answer, self._entry)))
            except Exception as error:  # noqa: BLE001 - scorers raise anything for text that they can't read
                info["unreadable"] = repr(error)[:200]
        return "", max(scores), True, False, info


def reasoning_tasks(dataset: str, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw seeds for questions of a data set with its default settings; keys `id`, a hash of the question, and `seed`.

    The splits share no question: each question is generated once to find its split.
    """
    make = imported("reasoning_gym", "reasoning-gym").create_dataset

    def draw(source: random.Random) -> dict[str, Any]:
        number = source.randrange(2**31)
        question = str(make(dataset, size=1, seed=number)[0]["question"])
        return {"id": f"{dataset}-{hashlib.sha256(question.encode()).hexdigest()[:16]}", "seed": number}

    return draw_tasks(split, count, seed, draw)
