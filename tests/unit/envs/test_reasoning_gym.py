"""Every data set of reasoning-gym pays the reply that it asks for, with working before it as without."""

from __future__ import annotations

import json

import pytest

from palestra.envs.tasks import final_answers
from palestra_worlds import ReasoningEnvironment

DATASETS = pytest.importorskip("reasoning_gym.factory").DATASETS
WORKING = "First, 3 * 4 = 12 and -7.5 is no answer.\nSo the list [1, 2] {x} is False, and True is 99 red (a) A B#."
QUICK = ("gsm_symbolic", "chain_sum", "leg_counting", "prime_factorization", "group_anagrams", "n_queens", "syllogism")
NO_ANSWER = {"composite", "boxnet", "rush_hour"}  # needs data sets of its own; the package has no answers


def answer_of(entry) -> str:
    """The package's own answer to a question; some have many, of which the package names one."""
    known = entry["metadata"]
    example = known.get("possible_answer") or known.get("example_answer") or known.get("example_correct_answer")
    if entry["answer"] is not None:
        return str(entry["answer"])
    return example if isinstance(example, str) else json.dumps(example)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(set(DATASETS) - NO_ANSWER)
    ],
)
def test_the_right_answer_pays_1_with_working_and_without(name):
    for seed in (3, 4):
        environment = ReasoningEnvironment(name)
        environment.reset({"seed": seed})
        right = answer_of(environment._entry)
        for reply in (
            right,
            f"{WORKING}\n{right}",
            f"{WORKING}\n\n{right}\n",
            f"{WORKING}\n<answer>{right}</answer>",
            f"{WORKING}\n<answer>no, wait</answer> <answer>\n{right}\n</answer> is what I say.",
            f"{WORKING}\n```\n{right}\n```\n",
        ):
            _, reward, terminated, _, _ = environment.step(reply)
            assert (reward, terminated) == (1.0, True), reply


@pytest.mark.parametrize(
    ("name", "seed", "right", "reply"),
    [
        ("gsm_symbolic", 13, "42700", "3 * 4 = 12\n42,700"),
        ("gsm_symbolic", 13, "42700", "<answer>42,700.0</answer>"),
        ("lcm", 11, "1800", "```\n1,800\n```"),
        ("chain_sum", 10, "-14", "**−14**"),
    ],
)
def test_a_number_is_right_however_it_is_written(name, seed, right, reply):
    environment = ReasoningEnvironment(name)
    assert environment.reset({"seed": seed})[1]["answer"] == right
    assert environment.step(reply)[1] == 1.0


@pytest.mark.parametrize("reply", ["15 * 11 = 165", "15\n16", "15\nso 165", "", "none", "<answer>16</answer>\n15"])
def test_a_right_number_in_the_working_pays_no_more_than_a_wrong_answer(reply):
    environment = ReasoningEnvironment("gsm_symbolic")
    _, info = environment.reset({"seed": 178348009})
    assert info["answer"] == "15"
    assert environment.step(reply)[1] < 0.1


def test_a_reply_that_the_scorer_can_not_read_pays_0_and_the_reason_is_recorded():
    environment = ReasoningEnvironment("prime_factorization")
    environment.reset({"seed": 3})
    _, reward, terminated, _, info = environment.step("two times five")
    assert (reward, terminated) == (0.0, True)
    assert "ValueError" in info["unreadable"]


@pytest.mark.parametrize(
    ("reply", "lines", "answers"),
    [
        ("15", 1, ["15"]),
        ("a\nb\n\n15\n", 1, ["15"]),
        ('Here:\n[\n  ["a", "b"],\n  []\n]', 1, ['[\n  ["a", "b"],\n  []\n]']),
        ("x\nA[1] to B[2]", 1, ["A[1] to B[2]"]),
        ("x\n]", 1, ["]"]),
        ("w\n1 2\n3 4", 2, ["1 2\n3 4", "w\n1 2\n3 4"]),
        ("w\n\n1\n2\n3", 2, ["2\n3", "1\n2\n3"]),
        ("```json\n{}\n```", 1, ["{}"]),
        ("", 1, [""]),
        ("", 3, ["", ""]),
    ],
)
def test_the_answer_is_the_end_of_a_reply(reply, lines, answers):
    assert final_answers(reply, lines) == answers
