"""Every environment that ships goes through `check_environment`."""

from __future__ import annotations

import pytest

from palestra.envs import Gomoku, TaskEnvironment, check_environment

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
        (lambda: TaskEnvironment(always_right), [{"prompt": "é?", "n": 1}], ["", "é", "x" * 1000]),
    ],
)
def test_what_ships_keeps_to_what_environments_have_to_do(make, tasks, actions):
    check_environment(make, tasks, actions)
