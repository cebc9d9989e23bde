"""Questions of the package `reasoning-gym`, generated from a seed and scored by the package's own scorers.

`reasoning-gym` is an optional dependency, imported only when an environment is created.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

from palestra.envs.arithmetic import is_number, last_number
from palestra.envs.environment import Environment
from palestra.envs.final_answer import final_answers
from palestra.envs.task_splits import Split, draw_tasks
from palestra.errors import ConfigError
from palestra_worlds.evaluated_answers import may_be_scored


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
        self._make, self._dataset, self._settings = _create_dataset(), dataset, settings
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
            if is_number(expected) and not is_number(answer):
                number = last_number(answer)  # some scorers would take the first one
                answer = answer if number is None else str(number)
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
    make = _create_dataset()

    def draw(source: random.Random) -> dict[str, Any]:
        number = source.randrange(2**31)
        question = str(make(dataset, size=1, seed=number)[0]["question"])
        return {"id": f"{dataset}-{hashlib.sha256(question.encode()).hexdigest()[:16]}", "seed": number}

    return draw_tasks(split, count, seed, draw)


def _create_dataset() -> Callable[..., Any]:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError("this environment needs reasoning-gym; run: pip install reasoning-gym") from None
    found: Callable[..., Any] = reasoning_gym.create_dataset
    return found
