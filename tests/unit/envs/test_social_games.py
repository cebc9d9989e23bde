"""The prisoner's dilemma and the negotiation: what is seen, what is paid, and what is private."""

from __future__ import annotations

import pytest

from palestra_inspect.environment_check import check_environment
from palestra_worlds import Negotiation, PrisonersDilemma
from unit.envs.playing import play, says


def texts(seen, role):
    return [one.content[0].text for one in seen if one.agent == role and not one.is_last]


def earned(seen):
    return {role: sum(one.reward or 0 for one in seen if one.agent == role) for role in ("first", "second")}


async def replies(environment, task, **answers):
    left = {role: iter(texts) for role, texts in answers.items()}
    return await play(environment, task, lambda observation: says(next(left[observation.agent])))


async def test_both_choose_at_the_same_time_and_see_it_afterwards():
    seen = await replies(PrisonersDilemma(rounds=4), {}, first="cdcd", second="ddcc")
    assert texts(seen, "first") == ["-", "cd", "dd", "cc"]
    assert texts(seen, "second") == ["-", "dc", "dd", "cc"]
    assert earned(seen) == {"first": 0.0 + 1 + 3 + 5, "second": 5.0 + 1 + 3 + 0}
    # Each round's reward belongs to the choice of that round.
    mine = [one for one in seen if one.agent == "first"]
    assert [one.reward for one in mine] == [None, 0.0, 1.0, 3.0, 5.0]
    assert [one.parents for one in mine[1:]] == [(before.id,) for before in mine[:-1]]


async def test_no_choice_earns_nothing_and_the_round_counts():
    seen = await replies(PrisonersDilemma(rounds=3), {}, first=["x", "x", "c"], second=["c", "?", "d"])
    assert texts(seen, "first") == ["-", "?c", "??"]
    assert earned(seen) == {"first": 0.0, "second": 3.0 + 0.0 + 5.0}


async def test_a_deal_is_worth_to_each_what_it_gets():
    environment = Negotiation()
    seen = await replies(environment, {"seed": 3}, first=["000", "y"], second=["100"])
    counts, first, nothing = texts(seen, "first")[0].split()
    same, second, offer = texts(seen, "second")[0].split()
    assert (same, nothing, offer) == (counts, "-", "000")
    assert texts(seen, "first")[1] == f"{counts} {first} 100"
    for worth in (first, second):
        assert sum(int(w) * int(c) for w, c in zip(worth, counts, strict=True)) == 10
    assert earned(seen) == {"first": 1 - int(first[0]) / 10, "second": int(second[0]) / 10}


async def test_what_is_worth_how_much_is_private():
    for seed in range(20):
        environment = Negotiation()
        await environment.reset({"seed": seed})
        shown = environment.view("first")
        other = environment._worth["second"]
        environment._worth["second"] = [9 - one for one in other]
        assert environment.view("first") == shown
        await environment.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [(["n"], []), (["000"], ["n"]), (["000"], ["999"]), (["000"] * 9, ["000"] * 9), (["y"], [])],
)
async def test_without_a_deal_there_is_nothing(first, second):
    seen = await replies(Negotiation(), {"seed": 1}, first=first, second=second)
    assert earned(seen) == {"first": 0.0, "second": 0.0}
    assert len([one for one in seen if not one.is_last]) <= 6


async def test_only_an_offer_can_be_accepted_and_moves_are_all_that_may_be_legal():
    environment = Negotiation()
    for seed in range(30):
        seen = await replies(environment, {"seed": seed}, first=["000", "n"], second=["000"])
        choices = [one.choices for one in seen if not one.is_last]
        assert ["y" in one for one in choices] == [False, True, True]
        assert all({*one} <= {*environment.moves} for one in choices)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"least.*round"):
        PrisonersDilemma(rounds=0)
    with pytest.raises(ValueError, match="two turns"):
        Negotiation(offers=1)


@pytest.mark.parametrize("make", [PrisonersDilemma, Negotiation, lambda: PrisonersDilemma(rules=True)])
def test_they_keep_to_what_environments_have_to_do(make):
    tasks = [{"seed": seed} for seed in range(5)]
    check_environment(make, tasks)
    check_environment(make, tasks, ["c", "d", "000", "y", "100", "é"])
