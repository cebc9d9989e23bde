"""Arithmetic in the head, with a calculator, and split between subagents: what is asked, and what counts as right."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.envs import Arithmetic, CalculatorEnvironment, catalog_entry
from palestra.envs.arithmetic import last_number, right_number
from palestra.tools.calculator import evaluate_expression
from palestra_worlds import SplitSum
from palestra_worlds.split_sum import right_product
from unit.envs.playing import calls, delegates, play, says


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 1,234.", "1234"),
        ("1234", "1234"),
        ("**1,234,567.50**", "1234567.5"),
        ("12 * 34 = 408", "408"),
        ("408!", "408"),
        ("-5", "-5"),
        ("x=-5", "-5"),
        ("minus: -1,000", "-1000"),
        ("12-5", "5"),
        (".5", "0.5"),
        ("1,23", "23"),
        ("1,2345", "2345"),
        ("3.", "3"),
        ("step 1. 408", "408"),
        ("no number", None),
        ("", None),
        ("٤٠٨", None),
        ("1" * 5000, "1" * 5000),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.integers(-(10**12), 10**12))
def test_any_way_to_write_a_number_counts_and_a_neighbour_does_not(number):
    task = {"answer": str(number)}
    for text in (f"{number}", f"It is {number:,}.", f"= {number}.0", f"7 times\n{number:,}!"):
        assert right_number(task, text) == 1.0
    assert right_number(task, str(number + 1)) == right_number(task, f"{number}5") == right_number(task, "") == 0.0


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "subagents"])
def test_the_answers_of_the_tasks_are_right(name):
    for split in ("train", "validation"):
        for task in catalog_entry(name).generate(split, 100, 1):
            asked = task["prompt"].removeprefix("What is ").rstrip(" =?")
            assert str(evaluate_expression(asked)) == task["answer"] == str(evaluate_expression(task["id"]))


def test_one_sum_one_answer():
    environment = Arithmetic()
    assert "number only" in environment.system
    assert environment.reset({"prompt": "3 + 5 =", "answer": "8"}) == ("3 + 5 =", {})
    assert environment.step("8")[1:4] == (1.0, True, False)
    assert environment.step("9")[1] == 0.0


PRODUCT = {"prompt": "What is 123 * 4567?", "answer": "561741"}


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([calls(("calculator", {"expression": "123 * 4567"})), says("The answer is 561,741.")], 1.25),
        ([calls(("calculator", {"expression": "123 * 4567"})), says("No idea.")], 0.25),
        ([calls(("calculator", {"expresion": "123 * 4567"})), says("561741")], 1.0),
        ([calls(("calculator", {"expression": "12x"})), calls(("finish", {"answer": "561741"}))], 1.0),
        ([says("561741")], 1.0),
        ([says("561742")], 0.0),
    ],
)
async def test_a_product_with_a_calculator(turns, reward):
    left = iter(turns)
    seen = await play(CalculatorEnvironment(used_tool_reward=0.25), PRODUCT, lambda observation: next(left))
    assert (seen[-1].reward, seen[-1].terminated) == (reward, True)
    assert len(seen) == len(turns) + 1


async def test_a_calculator_that_was_used_before_counts_for_nothing_now():
    environment = CalculatorEnvironment(used_tool_reward=0.25)
    first = iter([calls(("calculator", {"expression": "1"})), says("0")])
    assert (await play(environment, PRODUCT, lambda o: next(first)))[-1].reward == 0.25
    assert (await play(environment, PRODUCT, lambda o: says("0")))[-1].reward == 0.0


def test_a_solver_is_right_if_it_has_the_product_of_its_prompt():
    assert right_product("What is 12 * 34?", "408") == right_product("12×34", "It is 408.") == 1.0
    assert right_product("12 * 34", "409") == right_product("add them", "408") == right_product("", "") == 0.0


@pytest.mark.parametrize("results", ["together", "each"])
async def test_a_sum_of_two_products_is_split_between_two_solvers(results):
    task = {"prompt": "What is 7 * 8 + 11 * 4?", "answer": "100"}

    def agent(observation):
        if observation.agent != "agent":
            return says({"7 * 8": "56", "11 * 4": "45"}[observation.content[-1].text])
        if not observation.parents:
            return delegates("7 * 8", "11 * 4")
        return says("100")

    seen = await play(SplitSum(solver_reward=0.1, results=results), task, agent)
    rewards = {o.agent: o.reward for o in seen if o.is_last}
    assert rewards == {"agent": 1.0, "agent/solver-1": 0.1, "agent/solver-2": 0.0}
