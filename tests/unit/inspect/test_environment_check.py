"""`check_environment` finds each of the usual mistakes, and has nothing to say of an environment without one."""

from __future__ import annotations

import asyncio
import random

import pytest

from palestra.envs import Environment
from palestra.errors import InvalidEnvironment
from palestra_inspect.environment_check import check_environment

TASKS = [{"n": 3}, {"n": 1}]


class Good(Environment):
    blocking = False
    reusable = True

    def reset(self, task):
        self.left = task["n"]
        return "go", {}

    def step(self, action):
        self.left -= 1
        return action[:3], 1.0, self.left == 0, False, {}


def test_nothing_is_said_of_a_good_one():
    check_environment(Good, TASKS)


def change(**methods):
    return type("Bad", (Good,), methods)


def raises(*_):
    raise KeyError("x")


def task_changed(self, task):
    task["n"] += 1
    return Good.reset(self, task)


def remembers(self, task):
    self.left = task["n"] + getattr(self, "episodes", 0)
    self.episodes = getattr(self, "episodes", 0) + 1
    return "go", {}


MISTAKES = [
    ({"reset": lambda self, task: "go"}, "reset returns"),
    ({"reset": lambda self, task: (1, {})}, "reset returns"),
    ({"reset": raises}, r"reset.*KeyError"),
    ({"reset": task_changed}, r"changed.*task"),
    ({"step": lambda self, action: ("x", 1.0, True, {})}, "step returns"),
    ({"step": lambda self, action: (1, 1.0, True, False, {})}, "is text"),
    ({"step": lambda self, action: ("x", "1.0x", True, False, {})}, "a number"),
    ({"step": lambda self, action: ("x", float("nan"), True, False, {})}, "finite"),
    ({"step": lambda self, action: ("x", 1.0, None, False, {})}, r"True.*False"),
    ({"step": lambda self, action: ("x", 1.0, True, False, None)}, r"info.*dict"),
    ({"step": lambda self, action: (str(int(action)), 1.0, True, False, {})}, "ValueError"),
    ({"step": lambda self, action: ("x", 1.0, False, False, {})}, r"within.*50"),
    ({"step": lambda self, action: (str(random.random()), 1.0, True, False, {})}, "differently"),
    ({"reset": remembers}, "episode differs"),
    ({"close": raises}, "close raised"),
    ({"setup": raises}, "setup raised"),
]


@pytest.mark.parametrize(("methods", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_mistake_is_found_and_said(methods, words):
    with pytest.raises(InvalidEnvironment, match=words):
        check_environment(change(**methods), TASKS, max_steps=50)


def test_a_limit_of_steps_ends_an_endless_one():
    check_environment(change(max_steps=5, step=lambda self, action: ("x", 1.0, False, False, {})), TASKS, max_steps=50)
    with pytest.raises(ValueError, match=r"needs.*task"):
        check_environment(Good, [])


class GoodAsync(Environment):
    async def setup(self):
        self.loop = asyncio.get_running_loop()

    async def reset(self, task):
        self.left = task["n"]
        return "go", {}

    async def step(self, action):
        assert asyncio.get_running_loop() is self.loop
        self.left -= 1
        return action[:3], 1.0, self.left == 0, False, {}


def test_nothing_is_said_of_a_good_asynchronous_one():
    check_environment(GoodAsync, TASKS)


async def never_ends(self):
    self.task = asyncio.ensure_future(asyncio.sleep(60))


async def raises_later(self, action):
    await asyncio.sleep(0)
    raise KeyError("x")


async def one_value(self, task):
    return "go"


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"step": raises_later}, r"step.*KeyError"),
        ({"reset": one_value}, "reset returns"),
        ({"setup": never_ends, "step": Good.step}, "runs: sleep"),
    ],
)
def test_the_mistakes_of_asynchronous_ones_are_found(methods, said):
    with pytest.raises(InvalidEnvironment, match=said):
        check_environment(type("Bad", (GoodAsync,), methods), TASKS)


async def test_it_runs_beside_an_event_loop_of_the_caller():
    check_environment(GoodAsync, TASKS)
