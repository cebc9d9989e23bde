"""Subagents through a Runner, a fake engine and a real store: conversations, tokens, rewards and credit."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from palestra.algorithms.credit import episode_returns
from palestra.rollout import RolloutSpec
from palestra.runners import Runner
from palestra.session import Sessions
from palestra.types.calls import ForkReason
from palestra.types.records import Task
from palestra_worlds import SplitSum
from unit.building import FakeClock, rows_of
from unit.session.conftest import STOP, Bench

TASK = Task(task_id="t", data={"prompt": "What is 7 * 8 + 11 * 4?", "answer": "100"})


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reply(prompt: str) -> str:
    """What the model says: solvers use the calculator, the agent waits where a result is missing."""
    turns = prompt.split("<|im_start|>")
    if "Give each product" in turns[1]:
        if len(turns) == 4:
            return call("delegate", prompt="7 * 8") + "\n" + call("delegate", prompt="11 * 4")
        return "100" if "56" in prompt and "44" in prompt else "I wait."
    if len(turns) == 4:
        return call("calculator", expression=turns[2].removeprefix("user\n").removesuffix("<|im_end|>\n"))
    return turns[-2].split("\n")[2]


@pytest.mark.parametrize("results", ["together", "each"])
async def test_a_tree_of_agents_is_recorded_token_by_token_and_credited_by_branch(tmp_path, results):
    bench = Bench(tmp_path, FakeClock(), sampling={"max_tokens": 300})
    decode = bench.context.policies.runtime("policy").renderer.vocabulary.decode
    bench.script = lambda prompt, sampling: [*reply(decode(prompt.tolist())).encode(), STOP]
    await bench.store.groups.register("train", 0, 1, TASK, 1)
    play = RolloutSpec(environment=lambda: SplitSum(results=results, solver_calculator=True, solver_reward=0.25))
    trajectory = await Runner(Sessions(bench.context, 10), play).play_episode()
    bench.store.close()
    by_agent = {name: [c for c in trajectory.chats if c.agent == name] for name in {c.agent for c in trajectory.chats}}
    assert set(by_agent) == {"agent", "agent/solver-1", "agent/solver-2"}
    assert trajectory.episode.rewards == {"agent": 1.0, "agent/solver-1": 0.25, "agent/solver-2": 0.25}
    assert trajectory.episode.reward == sum(trajectory.episode.step_rewards) == 1.5
    assert trajectory.episode.metadata["termination"] == "done"
    for chats in by_agent.values():
        for before, after in pairwise(chats):
            assert after.extends is before
            assert after.messages[: len(before.messages) + 1] == (*before.messages, before.reply)
    forks = [chat.fork.reason for chat in trajectory.chats if chat.fork]
    assert forks == [ForkReason.NEW_CONVERSATION] * 2
    rows = rows_of(trajectory.chats)
    assert len(rows) == 3
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(len(c.completion_ids) for c in trajectory.chats)
    told = [m for m in by_agent["agent"][-1].messages if m.role in ("tool", "user")][1:]
    if results == "together":
        assert [(m.role, m.text) for m in told] == [("tool", "56"), ("tool", "44")]
    else:
        assert [m.role for m in told] == ["tool", "tool", "user"]
        assert {m.text.rpartition("\n")[2] for m in told} >= {"56", "44"}
    returns = episode_returns(trajectory, "branch", 1.0)
    assert {(key.baseline_group, key.name): value for key, value in returns.values.items()} == {
        ("agent", "agent"): 1.0,
        ("agent/", "agent/solver-1"): 0.25,
        ("agent/", "agent/solver-2"): 0.25,
    }


async def test_the_same_episode_with_agents_that_are_cut_off_ends(tmp_path):
    """`finish` while a solver's reply is being sampled: its part ends with that reply, and the episode with it."""
    bench = Bench(tmp_path, FakeClock(), sampling={"max_tokens": 300})
    decode = bench.context.policies.runtime("policy").renderer.vocabulary.decode

    def hasty(prompt, sampling):
        text = decode(prompt.tolist())
        done = "has answered" in text or "<tool_response>" in text
        said = call("finish", answer="100") if "Give each product" in text and done else reply(text)
        return [*said.encode(), STOP]

    bench.script = hasty
    await bench.store.groups.register("train", 0, 1, TASK, 1)
    play = RolloutSpec(environment=lambda: SplitSum(results="each", solver_calculator=True))
    trajectory = await Runner(Sessions(bench.context, 10), play).play_episode()
    bench.store.close()
    assert trajectory.episode.reward == 1.0
    assert trajectory.episode.metadata["termination"] == "done"
    assert [c.reply.tool_calls[0].function.name for c in trajectory.chats if c.agent == "agent"] == [
        "delegate",
        "finish",
    ]


async def test_solvers_without_a_reward_of_their_own_answer_for_that_of_the_agent(tmp_path):
    bench = Bench(tmp_path, FakeClock(), sampling={"max_tokens": 300})
    decode = bench.context.policies.runtime("policy").renderer.vocabulary.decode
    bench.script = lambda prompt, sampling: [*reply(decode(prompt.tolist())).encode(), STOP]
    await bench.store.groups.register("train", 0, 1, TASK, 1)
    play = RolloutSpec(environment=lambda: SplitSum(solver_calculator=True))
    trajectory = await Runner(Sessions(bench.context, 10), play).play_episode()
    bench.store.close()
    assert trajectory.episode.rewards == {"agent": 1.0}
    returns = episode_returns(trajectory, "branch", 1.0)
    assert {key.name: value for key, value in returns.values.items()} == {
        "agent": 1.0,
        "agent/solver-1": 1.0,
        "agent/solver-2": 1.0,
    }
