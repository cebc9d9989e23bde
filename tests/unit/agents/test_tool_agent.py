"""An agent that runs its own tools inside a TimeStep."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from palestra.agents import ToolAgent
from palestra.envs import Environment, TaskEnvironment
from palestra.rollout import RolloutSpec
from palestra.runners import Runner
from palestra.session import Sessions
from palestra.tools import Calculator, ToolManager, tool
from palestra.types.messages import Observation, text_message
from palestra.types.records import Task
from unit.building import FakeClock, make_chat, rows_of
from unit.envs.playing import calls, says
from unit.session.conftest import STOP, Bench

MOVE = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}
MULTIPLY = ("calculator", {"expression": "2 * 3"})


class Policy:
    """Says `replies`, one after another, and remembers what it was sent."""

    name = "policy"

    def __init__(self, *replies, history=()) -> None:
        self.history, self.replies = history, list(replies)
        self.sent, self.offered, self.limits = [], [], []

    async def chat(self, messages, *, tools=(), max_tokens=None, **_):
        self.sent.append(tuple(messages))
        self.offered.append([t["function"]["name"] for t in tools])
        self.limits.append(max_tokens)
        return replace(make_chat(index=len(self.sent)), reply=self.replies.pop(0))


def sees(*tools) -> Observation:
    return Observation(id="o0", parents=(), agent="agent", content=(text_message("user", "2 * 3?"),), tools=tools)


async def test_tools_are_run_until_a_reply_without_a_call():
    history = (text_message("user", "1?"), says("1"))
    policy = Policy(
        calls(MULTIPLY), calls(MULTIPLY, ("calculator", {"expression": "x"}), ids="d"), says("6"), history=history
    )
    chats, action = await ToolAgent([Calculator()], max_tokens=7).step(sees(), policy)
    assert action == says("6")
    assert [chat.reply for chat in chats] == [calls(MULTIPLY), chats[1].reply, says("6")]
    assert policy.sent[0] == (*history, text_message("user", "2 * 3?"))
    for before, after, reply in zip(policy.sent, policy.sent[1:], chats, strict=False):
        assert after[: len(before) + 1] == (*before, reply.reply)
    assert [(m.tool_call_id, m.text) for m in policy.sent[1][4:]] == [("c0", "6")]
    told = policy.sent[2][6:]
    assert [m.tool_call_id for m in told] == ["d0", "d1"]
    assert "only numbers" in told[1].text
    assert policy.limits == [7, 7, 7]


async def test_the_last_of_the_calls_that_it_may_make_is_the_action():
    policy = Policy(*[calls(MULTIPLY)] * 5)
    agent = ToolAgent([Calculator()], max_calls=2)
    chats, action = await agent.step(sees(), policy)
    assert (len(chats), action) == (2, calls(MULTIPLY))
    assert agent.manager.counts["calls"] == 1  # nobody would read what the last one brings
    with pytest.raises(ValueError, match="least 1"):
        ToolAgent([], max_calls=0)


async def test_a_call_of_the_environment_is_the_action():
    policy = Policy(calls(MULTIPLY), calls(("move", {})))
    chats, action = await ToolAgent([Calculator()]).step(sees(MOVE), policy)
    assert (len(chats), action) == (2, calls(("move", {})))
    assert policy.offered == [["calculator", "move"]] * 2


async def test_a_tool_of_the_environment_goes_before_its_own_of_that_name():
    @tool(name="move")
    def mine() -> str:
        """Mine."""
        raise AssertionError("not this one")

    policy = Policy(calls(("move", {})))
    chats, action = await ToolAgent([mine, Calculator()]).step(sees(MOVE), policy)
    assert (len(chats), action) == (1, calls(("move", {})))
    assert policy.offered == [["calculator", "move"]]


async def test_of_both_kinds_in_one_turn_only_its_own_are_run_and_every_call_is_answered():
    both = calls(("move", {}), MULTIPLY, ("no_such_tool", {}))
    policy = Policy(both, says("6"))
    await ToolAgent([Calculator()]).step(sees(MOVE), policy)
    told = policy.sent[1][2:]
    assert [m.tool_call_id for m in told] == ["c0", "c1", "c2"]
    assert told[0].text == "Error: not done; call move without other tools."
    assert told[1].text == "6"
    assert "no tool 'no_such_tool'" in told[2].text


async def test_calls_of_a_turn_run_side_by_side_and_the_manager_has_its_limits():
    inside, most = 0, 0

    @tool
    async def meet() -> str:
        """Meet."""
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return ""

    turn = calls(*[("meet", {})] * 6)
    await ToolAgent([meet]).step(sees(), Policy(turn, says("")))
    assert most == 6
    most = 0
    await ToolAgent(ToolManager([meet], max_parallel=2)).step(sees(), Policy(turn, says("")))
    assert most == 2


async def test_in_an_episode_the_calls_of_a_time_step_are_one_conversation(tmp_path):
    bench = Bench(tmp_path, FakeClock(), sampling={"max_tokens": 200})
    call = json.dumps({"name": "calculator", "arguments": {"expression": "2 * 3"}})
    replies = iter([f"<tool_call>\n{call}\n</tool_call>", "6"])
    bench.script = lambda prompt, sampling: [*next(replies).encode(), STOP]
    await bench.store.groups.register("train", 0, 1, Task(task_id="t", data={"prompt": "2 * 3?"}), 1)
    play = RolloutSpec(
        environment=lambda: TaskEnvironment(lambda task, answer: float(answer == "6")),
        agents={"": ToolAgent([Calculator()])},
    )
    trajectory = await Runner(Sessions(bench.context, 10), play).play_episode()
    bench.store.close()
    one, two = trajectory.chats
    assert two.extends is one
    assert (one.time_step, two.time_step, two.fork) == (0, 0, None)
    assert [m.role for m in two.messages] == ["user", "assistant", "tool"]
    assert (trajectory.episode.reward, trajectory.episode.step_rewards) == (1.0, (1.0,))
    (row,) = rows_of(trajectory.chats)
    assert int(row.loss_mask.sum()) == len(one.completion_ids) + len(two.completion_ids)


async def test_the_next_turn_goes_on_from_the_tools_that_were_run_in_the_one_before(tmp_path):
    class Twice(Environment):
        max_steps = 2

        def reset(self, task):
            return "2 * 3?", {}

        def step(self, action):
            return "again?", float(action == "6"), False, False, {}

    bench = Bench(tmp_path, FakeClock(), sampling={"max_tokens": 200})
    call = json.dumps({"name": "calculator", "arguments": {"expression": "2 * 3"}})
    replies = iter([f"<tool_call>\n{call}\n</tool_call>", "6"] * 2)
    bench.script = lambda prompt, sampling: [*next(replies).encode(), STOP]
    await bench.store.groups.register("train", 0, 1, Task(task_id="t", data={}), 1)
    play = RolloutSpec(environment=Twice, agents={"": ToolAgent([Calculator()])})
    trajectory = await Runner(Sessions(bench.context, 10), play).play_episode()
    bench.store.close()
    chats = trajectory.chats
    assert [chat.time_step for chat in chats] == [0, 0, 1, 1]
    assert [chat.extends for chat in chats] == [None, *chats[:3]]
    assert [chat.fork for chat in chats] == [None] * 4
    assert [m.role for m in chats[3].messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert len(rows_of(chats)) == 1
