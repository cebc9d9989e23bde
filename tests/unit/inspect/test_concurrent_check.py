"""`check_environment` finds each of the usual mistakes of a concurrent environment, and says nothing of a good one."""

from __future__ import annotations

import asyncio
import random

import pytest

from palestra.envs import ConcurrentEnvironment, Environment
from palestra.errors import InvalidEnvironment
from palestra.types.messages import ChatMessage, TextPart, text_message
from palestra_inspect.environment_check import check_environment

TASKS = [{"n": 3}, {"n": 1}]
TOOLS = ({"type": "function", "function": {"name": "look"}},)


def user(text: str) -> tuple[ChatMessage, ...]:
    return (text_message("user", text),)


class Good(ConcurrentEnvironment):
    """Two agents, `n` turns each; every call is answered."""

    reusable = True

    async def start(self, task):
        self.left = {"a": task["n"], "b": task["n"]}
        for agent in self.left:
            self.emit(agent, user("go"), tools=TOOLS)

    async def on_action(self, observation, action):
        agent = observation.agent
        self.left[agent] -= 1
        over = self.left[agent] == 0
        self.emit(
            agent,
            (*self.answers(action), *user(action.text[:3])),
            parents=(observation.id,),
            tools=TOOLS,
            reward=1.0,
            terminated=over,
        )

    def answers(self, action):
        return tuple(
            ChatMessage(role="tool", content=(TextPart(text="seen"),), tool_call_id=call.id)
            for call in action.tool_calls
        )


def change(**methods):
    return type("Bad", (Good,), methods)


async def raises(*_):
    raise KeyError("x")


async def nothing(*_):
    return


async def task_changed(self, task):
    task["n"] += 1
    await Good.start(self, task)


async def remembers(self, task):
    self.episodes = getattr(self, "episodes", 0) + 1
    await Good.start(self, {"n": task["n"] + min(self.episodes, 2)})


async def starts_with_nothing(self, task):
    self.emit("a", ())


async def starts_twice(self, task):
    self.emit("a", user("one"))
    self.emit("a", user("two"))


async def runs_on(self, task):
    self.kept = asyncio.create_task(asyncio.sleep(60))
    await Good.start(self, task)


async def waits_for_ever(self, observation, action):
    await asyncio.Event().wait()


async def times_out(self, observation, action):
    raise TimeoutError("of the world")


async def draws(self, observation, action):
    self.emit("a", user(str(random.random())), terminated=True)


def emitting(**values):
    async def on_action(self, observation, action):
        self.emit(**({"agent": observation.agent, "content": user("x"), "terminated": True} | values))

    return on_action


async def never_ends(self, observation, action):
    self.emit(observation.agent, (*self.answers(action), *user("on")), tools=TOOLS)


MISTAKES = [
    ({"start": raises}, r"reset.*KeyError"),
    ({"start": nothing}, r"began.*answer"),
    ({"start": task_changed}, r"changed.*task"),
    ({"start": starts_with_nothing}, r"first.*'a'"),
    ({"start": starts_twice}, "it answered"),
    ({"start": remembers}, "episode differs"),
    ({"start": runs_on}, "runs: sleep"),
    ({"on_action": raises}, r"action.*KeyError"),
    ({"on_action": times_out}, "TimeoutError"),
    ({"on_action": waits_for_ever}, r"shown.*0.2"),
    ({"on_action": draws}, "differently"),
    ({"on_action": never_ends}, r"within.*50"),
    ({"on_action": emitting(agent="")}, "by name"),
    ({"on_action": emitting(content="text")}, r"tuple.*messages"),
    ({"on_action": emitting(reward=float("inf"))}, "finite"),
    ({"on_action": emitting(reward="1")}, "is no reward"),
    ({"on_action": emitting(terminated=1)}, r"True.*False"),
    ({"on_action": emitting(parents=("o77",))}, r"nobody.*seen"),
    ({"on_action": emitting(terminated=False, tools=({"name": "look"},))}, "OpenAI's shape"),
    ({"answers": lambda self, action: ()}, "no answer"),
    (
        {"answers": lambda self, action: (ChatMessage(role="tool", tool_call_id="other"),) * len(action.tool_calls)},
        "no answer",
    ),
    ({"answers": lambda self, action: (ChatMessage(role="tool", tool_call_id="other"),)}, "not make"),
    ({"setup": raises}, "setup raised"),
    ({"close": raises}, "close raised"),
    ({"max_steps": 0}, r"max_steps.*1"),
]


@pytest.mark.parametrize(("methods", "words"), MISTAKES, ids=[f"{n}-{words}" for n, (_, words) in enumerate(MISTAKES)])
def test_a_mistake_is_found_and_said(methods, words):
    actions = ["hello"] if words == "not make" else None
    with pytest.raises(InvalidEnvironment, match=words):
        check_environment(change(**methods), TASKS, actions, max_steps=50, timeout_seconds=0.2)


def test_nothing_is_said_of_a_good_one():
    check_environment(Good, TASKS)
    check_environment(change(reusable=False), TASKS)


def test_a_limit_of_actions_ends_an_endless_one():
    check_environment(change(on_action=never_ends, max_steps=5), TASKS, max_steps=50)


async def test_it_can_be_called_where_an_event_loop_runs():
    check_environment(Good, TASKS)


def test_what_is_made_is_a_new_environment():
    one = Good()
    with pytest.raises(InvalidEnvironment, match="environment twice"):
        check_environment(lambda: one, TASKS)
    with pytest.raises(InvalidEnvironment, match="no environment"):
        check_environment(lambda: 3, TASKS)
    with pytest.raises(InvalidEnvironment, match="make raised"):
        check_environment(lambda: 1 / 0, TASKS)
    with pytest.raises(ValueError, match=r"needs.*task"):
        check_environment(Good, TASKS, [])


def test_an_environment_with_tools_is_tried_with_calls():
    class Calls(Environment):
        tools = TOOLS
        asked: list[str]

        def reset(self, task):
            return "go", {}

        def step(self, action):
            return "", 0.0, True, False, {}

        def step_message(self, action):
            if action.tool_calls:
                raise RuntimeError(action.tool_calls[0].function.name)
            return self.step(action.text)

    with pytest.raises(InvalidEnvironment, match=r"step\('look'.*RuntimeError"):
        check_environment(Calls, TASKS)
