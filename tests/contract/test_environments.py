"""Every environment that ships goes through `check_environment`."""

from __future__ import annotations

import pytest

from palestra.envs import TaskEnvironment
from palestra.errors import ConfigError
from palestra_inspect.environment_check import check_environment
from palestra_worlds import FrozenLake, Gomoku, GomokuDuel, GymnasiumEnvironment, KuhnPoker, ReasoningEnvironment

BOARDS = [
    {},
    {"size": 3, "opponent": "greedy", "seed": 4},
    {"size": 5, "to_win": 4, "first": "opponent", "seed": 1},
    {"size": 19, "to_win": 5, "seed": 2},
]


def always_right(task, answer):
    return len(answer) + task["n"]


@pytest.mark.parametrize(
    ("make", "tasks", "actions"),
    [
        (Gomoku, BOARDS, ["1 1", "2,2", "row 3 column 3", "1 2", "2 1", "3 1", "4 4", "5 5"]),
        (Gomoku, BOARDS, ["", "hello", "0 0", "99999 1", "\ud800"]),
        (GomokuDuel, BOARDS[:1] + BOARDS[2:], ["1 1", "2,2", "row 3 column 3", "1 2", "2 1", "3 1", "4 4", "5 5"]),
        (GomokuDuel, BOARDS[:1] + BOARDS[2:], ["", "hello", "0 0", "99999 1", "\ud800"]),
        (KuhnPoker, [{"seed": 1}, {"cards": [2, 0]}], ["p", "b", "b", "fold"]),
        (FrozenLake, [{"seed": 1}, {}], ["down", "I go right!", "2", "RIGHT", "down", "down", "right"]),
        (lambda: FrozenLake(size=8, is_slippery=True), [{"seed": 1}, {"seed": 2}], ["down", "right", "up"]),
        (FrozenLake, [{"seed": 1}], ["", "jump", "99999999999999", "-1"]),
        (lambda: GymnasiumEnvironment("Taxi-v4"), [{"seed": 3}], ["0", "1", "2", "3", "4", "5"]),
        (lambda: GymnasiumEnvironment("Blackjack-v1"), [{"seed": 3}], ["1", "1", "0"]),
        (lambda: ReasoningEnvironment("countdown"), [{"seed": 3}], ["82 + 20 + 67 - 50"]),
        (lambda: ReasoningEnvironment("gsm_symbolic"), [{"seed": 3}, {"seed": 4}], ["20", "", "é"]),
        (lambda: TaskEnvironment(always_right), [{"prompt": "é?", "n": 1}], ["", "é", "x" * 1000]),
    ],
)
def test_what_ships_keeps_to_what_environments_have_to_do(make, tasks, actions):
    check_environment(make, tasks, actions)


def test_frozen_lake_is_told_as_a_map_and_walked_by_words():
    lake = FrozenLake()
    text, _ = lake.reset({"seed": 0})
    assert text.splitlines()[1:] == ["@FFF", "FHFH", "FFFH", "HFFG"]
    for word in ("down", "Down.", "right", "then right", "down"):
        text, reward, terminated, _, _ = lake.step(word)
    assert not terminated
    text, reward, terminated, _, _ = lake.step("I think left is wrong")  # the first action that is named
    assert text.splitlines() == ["SFFF", "FHFH", "FFFH", "H@FG"]
    lake.step("right")
    _, reward, terminated, _, _ = lake.step("2")
    assert (reward, terminated) == (1.0, True)


def test_reasoning_tasks_are_scored_by_their_own_scorer():
    countdown = ReasoningEnvironment("countdown")
    question, info = countdown.reset({"seed": 3})
    assert "119" in question
    assert countdown.step(info["answer"])[1] == 1.0
    assert countdown.reset({"seed": 3})[0] == question != countdown.reset({"seed": 4})[0]
    assert countdown.step("1 + 1")[1] < 1.0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: GymnasiumEnvironment("NoSuchWorld-v0"), "NoSuchWorld"),
        (lambda: GymnasiumEnvironment("FrozenLake-v1", actions=["a", "b"]), "2 names"),
        (lambda: ReasoningEnvironment("no_such_set"), "no_such_set"),
        (lambda: ReasoningEnvironment("countdown", no_such_setting=1), "no_such_setting"),
    ],
)
def test_what_can_not_be_played_is_said_when_it_is_made(make, why):
    with pytest.raises(ConfigError, match=why):
        make()
