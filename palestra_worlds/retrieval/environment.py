"""Environment `retrieval`: questions about people who are made up, answered by searching passages about them."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from palestra.envs.tasks import Split, draw_tasks, final_answers
from palestra.envs.tool_environment import ToolEnvironment
from palestra.types.clock import Clock
from palestra_worlds.retrieval.search import PassageSearch, embedder_folder

SYSTEM = "Search for what the question asks about, then finish with the answer alone."
_PEOPLE = 120
_FIRST = ("Mira", "Tobin", "Selda", "Oren", "Ilka", "Bastien", "Noor", "Pavel", "Greta", "Hamid", "Lotte", "Ravi")
_LAST = ("Anders", "Belmont", "Castile", "Dorn", "Eklund", "Farrow", "Grimaldi", "Hoek", "Ivarsson", "Jurado")
_TOWNS = ("Aldmoor", "Brinley", "Corvath", "Dunmere", "Esterholm", "Fallow", "Gravenna", "Hartsvik")
_JOBS = ("repairs violins", "bakes rye bread", "draws maps", "keeps bees", "builds boats", "studies moths")
_PETS = ("a parrot", "two cats", "an old horse", "a tortoise", "three hens", "a greyhound")
# By what is asked: the question, which shares few words with the passage.
_QUESTIONS = {
    "town": "In which town is the home of {name}?",
    "job": "What does {name} do for a living?",
    "pet": "Which animals does {name} own?",
}


class RetrievalEnvironment(ToolEnvironment):
    """A question about one of 120 people; the tool `search` finds passages, by an embedding model.

    The reward is 1 if the answer contains the requested fact, else 0. The facts are invented, so that no model can know
    them, and the same in every task.
    """

    reusable = True

    def __init__(
        self, *, system: str = SYSTEM, results: int = 3, max_steps: int = 4, clock: Clock | None = None
    ) -> None:
        """Create the environment.

        Args:
            system: the system message.
            results: number of passages that a search returns.
            max_steps: limit of the agent's replies in an episode.
            clock: source of observation times; None: the system's clock.

        Raises:
            ConfigError: the embedding model is not installed.
            ValueError: `results` or `max_steps` is below 1.
        """
        embedder_folder()
        search = _searches(results)
        super().__init__([search], right_fact, system=system, max_steps=max_steps, timeout_seconds=120, clock=clock)


def right_fact(task: Mapping[str, Any], answer: str) -> float:
    """Return 1.0 if the end of an answer has the task's fact as whole words, and no other of its kind, else 0.0."""
    said = f" {' '.join(re.findall(r'[a-z]+', final_answers(answer, 1)[0].lower()))} "
    kinds = {"town": _TOWNS, "job": _JOBS, "pet": _PETS}
    named = [fact for fact in kinds[task["asked"]] if f" {fact.lower()} " in said]
    return float(named == [task["answer"]])


def retrieval_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw questions, of which there are 360; keys `id`, `prompt`, `asked` and `answer`. The splits share none."""
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    person = source.choice(_people())
    asked = source.choice(list(_QUESTIONS))
    name = person["name"]
    prompt = _QUESTIONS[asked].format(name=name)
    return {"id": f"{name}-{asked}", "prompt": prompt, "asked": asked, "answer": person[asked]}


@lru_cache(maxsize=1)
def _people() -> list[dict[str, str]]:
    """Return the people, each with a name and three facts."""
    source = random.Random("people")
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    kinds = {"town": _TOWNS, "job": _JOBS, "pet": _PETS}
    return [{"name": name, **{kind: source.choice(facts) for kind, facts in kinds.items()}} for name in names[:_PEOPLE]]


@lru_cache(maxsize=8)
def _searches(results: int) -> PassageSearch:
    """Return the tool over all passages; one for all environments, so that vectors are computed once."""
    passages = [f"{one['name']} lives in {one['town']}, {one['job']} and has {one['pet']}." for one in _people()]
    return PassageSearch(passages, results)
