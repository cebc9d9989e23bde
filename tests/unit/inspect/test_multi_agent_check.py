"""`check_environment` finds the usual mistakes of environments of several agents."""

from __future__ import annotations

import asyncio
import re

import pytest

from palestra.envs import (
    AgentProtocol,
    MultiAgentEnvironment,
    Outcome,
    Stage,
    decided,
    free,
    phases,
    simultaneous,
    turns,
)
from palestra.errors import InvalidEnvironment
from palestra.types.messages import text_message
from palestra_inspect.environment_check import check_environment

pytestmark = pytest.mark.ci


class Good(MultiAgentEnvironment):
    """Three agents act `n` times; the first gains what the others lose."""

    reusable = True
    roles = ("a", "b", "c")
    zero_sum = True

    def begin(self, task):
        self.left = task["n"]

    def protocol(self, task):
        return simultaneous()

    def view(self, role):
        return f"{role} {self.left}"

    def legal(self, role):
        return ("x", "y")

    def apply(self, actions):
        self.left -= 1
        return Outcome(rewards={"a": 2.0, "b": -1.0, "c": -1.0}, over=True) if self.left == 0 else None


def change(**members):
    return type("Changed", (Good,), members)


def protocol(made):
    return {"protocol": lambda self, task: made()}


TASKS = [{"n": 3}, {"n": 2}]


@pytest.mark.parametrize(
    "make",
    [
        Good,
        change(**protocol(lambda: turns(("a", "b", "c"))), begin=lambda self, task: setattr(self, "left", 6)),
        change(**protocol(free), begin=lambda self, task: setattr(self, "left", 7)),
        change(**protocol(lambda: phases([simultaneous(rounds=1), turns(("c", "a"))]))),
        change(reusable=False),
        change(max_steps=4, zero_sum=False),  # the second barrier is cut: what two roles were asked is withdrawn
    ],
)
def test_nothing_is_said_of_good_ones(make):
    check_environment(make, TASKS)


class Forgets(Good):
    async def _show(self, roles, causes):
        await super()._show([role for role in roles if role != "b" or self.left != 2], causes)


class AfterTheEnd(Good):
    """Rewards and asks beside the base class."""

    asks = False

    async def _advance(self):
        await super()._advance()
        if self._over:
            self.emit("a", (text_message("user", "more"),), reward=None if self.asks else 1.0, terminated=not self.asks)


class Stops(AgentProtocol):
    """A user's own, which asks a role again that is done."""

    def begin(self, playing):
        return ("a",)

    def following(self, acted, playing, pending):
        return ("a",)

    def stages(self):
        return (Stage(kind="own", roles=("a", "b", "c")),)


def first_come(self, observation, action):
    self.order = [*getattr(self, "order", ()), observation.agent]
    return MultiAgentEnvironment.on_action(self, observation, action)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Forgets, r"'b'.*act"),
        (change(**protocol(lambda: turns(("a", "b")))), r"'c'.*acts"),
        (change(**protocol(lambda: decided(lambda: ("a", "b")))), r"'c'.*acts"),
        (change(zero_sum=True, total=1.0), r"0.*1.*2.*-1.*-1"),
        (AfterTheEnd, r"'a'.*gets.*1.0"),
        (type("Asks", (AfterTheEnd,), {"asks": True}), r"'a'.*asked"),
        (
            change(**protocol(Stops), apply=lambda self, actions: Outcome(done=("a",))),
            r"'a'.*done",
        ),
        (change(**protocol(lambda: turns(("a", "d")))), r"'d'.*'a'.*'b'.*'c'"),
        (change(roles=("a", "a")), "own name"),
        (change(apply=lambda self, actions: Outcome(rewards={"d": 1.0})), r"role.*'d'"),
        (
            change(on_action=first_come, view=lambda self, role: f"{role} {getattr(self, 'order', '')}"),
            "answers first",
        ),
        (change(apply=lambda self, actions: None), r"within.*50"),
        (change(legal=lambda self, role: ("x",), apply=lambda self, actions: 1 / 0), "ZeroDivisionError"),
    ],
)
def test_each_mistake_is_named(make, words):
    with pytest.raises(InvalidEnvironment, match=words):
        check_environment(make, TASKS, max_steps=50)


async def never(*_):
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"view": never}, r"reset.*0.2"),
        ({"begin": never}, r"reset.*0.2"),
        ({"setup": never}, r"setup.*0.2"),
        ({"close": never}, r"close.*0.2"),
        ({"apply": never}, r"shown.*0.2"),
    ],
)
def test_what_never_ends_is_given_up(methods, words):
    with pytest.raises(InvalidEnvironment, match=words):
        check_environment(change(**methods), TASKS, timeout_seconds=0.2)


def test_an_environment_that_never_rewards_is_named():
    def apply(rewards):
        return lambda self, actions: Outcome(over=True, rewards=rewards)

    with pytest.raises(InvalidEnvironment, match=re.escape("Outcome(rewards={'a': 0.0, 'b': 0.0}, over=True)")):
        check_environment(change(apply=apply({})), TASKS)
    check_environment(change(apply=apply({"a": 0.0})), TASKS)  # nobody has won
    check_environment(change(apply=lambda self, actions: None, max_steps=3), TASKS)  # these actions reach no end


def test_illegal_actions_that_were_asked_for_are_played():
    with pytest.raises(InvalidEnvironment, match=re.escape("replied 'z'")):
        check_environment(Good, TASKS, ["z"])
