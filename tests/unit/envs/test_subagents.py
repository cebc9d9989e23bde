"""Subagents: side by side, in trees, within limits, and each result where it belongs, exactly once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from palestra.errors import Conflict, EpisodeOver, InvalidEnvironment
from palestra.tools import Calculator, tool
from palestra_inspect.environment_check import check_environment
from palestra_worlds.subagents import Subagent, SubagentEnvironment
from unit.envs.playing import calls, delegates, play, says, settle, shown

TASK = {"prompt": "do it", "answer": "done"}
SOLVER = Subagent(name="solver", description="solves")


def exact(task, answer):
    return float(answer == task["answer"])


def made(*kinds, **settings) -> SubagentEnvironment:
    return SubagentEnvironment(kinds or (SOLVER,), exact, **settings)


def by_agent(seen):
    return {name: [o for o in seen if o.agent == name] for name in dict.fromkeys(o.agent for o in seen)}


def prompt_of(observation) -> str:
    return observation.content[-1].text


def told(observation) -> list[tuple[str, str]]:
    return [(m.role, m.text) for m in observation.content]


@tool
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


async def test_three_subagents_with_a_tool_of_200_ms_take_about_200_ms():
    solver = Subagent(name="solver", system="Solve.", tools=(wait,))
    environment = made(solver, system="Split.", subagent_reward_fn=lambda task, prompt, answer: float(answer))

    def agent(observation):
        if observation.agent == "agent":
            return delegates("1", "2", "3") if not observation.parents else says("done")
        return calls(("wait", {"seconds": 0.2})) if observation.content[0].role == "system" else says("0.5")

    started = time.perf_counter()
    seen = by_agent(await play(environment, TASK, agent))
    seconds = time.perf_counter() - started
    assert 0.2 <= seconds < 0.5
    assert list(seen) == ["agent", "agent/solver-1", "agent/solver-2", "agent/solver-3"]
    first, second, last = seen["agent"]
    assert told(first) == [("system", "Split."), ("user", "do it")]
    assert told(second) == [("tool", "0.5")] * 3
    assert second.tool_outputs == {"c0": "0.5", "c1": "0.5", "c2": "0.5"}
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    for number in (1, 2, 3):
        asked, answered, over = seen[f"agent/solver-{number}"]
        assert told(asked) == [("system", "Solve."), ("user", str(number))]
        assert asked.parents == (first.id,)
        assert told(answered) == [("tool", "waited")]
        assert (over.reward, over.terminated, over.truncated, over.content) == (0.5, True, False, ())
        assert {t["function"]["name"] for t in asked.tools} == {"wait", "finish"}
        assert answered.id in second.parents
    assert {t["function"]["name"] for t in first.tools} == {"delegate", "finish"}
    assert environment.counts == {"started": 3}


async def test_all_prompts_are_shown_before_any_of_them_is_answered():
    environment = made()
    await environment.reset(TASK)
    environment.act((await environment.observe()).id, delegates("a", "b", "c"))
    assert [(o.agent, prompt_of(o)) for o in await shown(environment)] == [
        ("agent/solver-1", "a"),
        ("agent/solver-2", "b"),
        ("agent/solver-3", "c"),
    ]
    await environment.abandon()


async def test_own_tools_beside_subagents_and_calls_that_are_wrong_are_all_answered():
    environment = made(SOLVER, Subagent(name="critic", description="finds faults"), tools=[Calculator()])
    turn = calls(
        ("calculator", {"expression": "2 * 3"}),
        ("delegate", {"kind": "critic", "prompt": "x"}),
        ("delegate", {"kind": "poet", "prompt": "x"}),
        ("delegate", {"kind": "solver"}),
        ("delegate", {"kind": "solver", "prompt": " "}),
        ("delegate", {"kind": ["solver"], "prompt": "x"}),
        ("sing", {}),
        ("delegate", {"kind": "solver", "prompt": "y"}),
    )

    def agent(observation):
        if observation.agent == "agent":
            return turn if not observation.parents else says("done")
        return says(f"answer to {prompt_of(observation)}")

    seen = by_agent(await play(environment, TASK, agent))
    assert list(seen) == ["agent", "agent/critic-1", "agent/solver-1"]
    assert [m.tool_call_id for m in seen["agent"][1].content] == [f"c{k}" for k in range(8)]
    texts = [m.text for m in seen["agent"][1].content]
    assert (texts[0], texts[1], texts[7]) == ("6", "answer to x", "answer to y")
    for text, words in zip(
        texts[2:7],
        ("no subagent 'poet'", "'prompt' is missing", "empty", r"no subagent ['solver']", "no tool 'sing'"),
        strict=True,
    ):
        assert words in text
    assert seen["agent/critic-1"][0].tools == ()


async def test_subagents_start_subagents_down_to_the_depth_that_is_allowed():
    environment = made(max_depth=2)

    def agent(observation):
        depth = observation.agent.count("/")
        if len(observation.parents) != min(depth, 1):  # it was told of a result
            return says(observation.content[0].text + "!")
        return delegates("deeper") if depth < 3 else says("bottom")

    seen = by_agent(await play(environment, TASK, agent))
    assert list(seen) == ["agent", "agent/solver-1", "agent/solver-1/solver-1"]
    offered = {name: {t["function"]["name"] for t in found[0].tools} for name, found in seen.items()}
    assert offered == {
        "agent": {"delegate", "finish"},
        "agent/solver-1": {"delegate", "finish"},
        "agent/solver-1/solver-1": set(),
    }
    assert "can't delegate" in seen["agent/solver-1/solver-1"][1].content[0].text
    assert environment.counts["too_deep"] >= 1


async def test_more_subagents_than_allowed_are_refused_in_words_and_counted():
    environment = made(max_agents=2)

    def agent(observation):
        if observation.agent == "agent":
            return delegates("a", "b", "c") if not observation.parents else says("done")
        return says(prompt_of(observation))

    seen = by_agent(await play(environment, TASK, agent))
    texts = [m.text for m in seen["agent"][1].content]
    assert texts[:2] == ["a", "b"]
    assert "may have 2 subagents" in texts[2]
    assert environment.counts == {"started": 2, "too_many": 1}


async def test_a_subagent_that_makes_too_many_steps_returns_what_it_has_with_a_note():
    solver = Subagent(name="solver", tools=(Calculator(),), max_steps=2)
    environment = made(solver, subagent_reward_fn=lambda task, prompt, answer: float(answer == "so far 6"))

    def agent(observation):
        if observation.agent == "agent":
            return delegates("a") if not observation.parents else says("done")
        text = "so far 6" if len(observation.content) == 1 and observation.content[0].role == "user" else ""
        return calls(("calculator", {"expression": "2 * 3"}), text=text)

    seen = by_agent(await play(environment, TASK, agent))
    assert seen["agent"][1].content[0].text == "so far 6\n(Cut off after 2 steps; it may not be finished.)"
    last = seen["agent/solver-1"][-1]
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, True)


@pytest.mark.parametrize(("answer", "reward"), [("done", 1.0), ("not yet", 0.0)])
async def test_an_agent_that_makes_too_many_steps_is_truncated_and_scored_by_what_it_said(answer, reward):
    environment = made(max_steps=2)

    def agent(observation):
        return delegates("a") if observation.agent == "agent" and not observation.parents else (
            calls(("delegate", {"prompt": "b"}), text=answer) if observation.agent == "agent" else says("x")
        )  # fmt: skip

    seen = by_agent(await play(environment, TASK, agent))
    last = seen["agent"][-1]
    assert (last.reward, last.terminated, last.truncated) == (reward, False, True)
    assert environment.counts["started"] == 1


async def test_finish_of_the_agent_cuts_off_whatever_is_at_work_and_stops_its_tools():
    stopped = []

    @tool
    async def hang() -> str:
        """Hang."""
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(True)
        return ""

    environment = made(Subagent(name="solver", tools=(hang,)), results="each", max_depth=2)
    await environment.reset(TASK)
    environment.act((await environment.observe()).id, delegates("tool", "parent", "slow", "quick"))
    first = {prompt_of(o): o for o in await shown(environment)}
    environment.act(first["tool"].id, calls(("hang", {})))
    environment.act(first["parent"].id, delegates("child"))
    (child,) = await shown(environment)
    environment.act(first["quick"].id, says("quick is done"))
    over, result = await environment.observe(), await environment.observe()
    assert (over.agent, result.agent) == ("agent/solver-4", "agent")
    environment.act(result.id, calls(("finish", {"answer": "done"})))
    ended = [await environment.observe() for _ in range(3)]
    assert {o.agent for o in ended} == {"agent/solver-1", "agent/solver-2", "agent"}
    assert stopped == [True]
    assert all(o.terminated and o.truncated for o in ended if o.agent != "agent")
    for open_one in (first["slow"], child):  # a reply that is being sampled is the last
        environment.act(open_one.id, calls(("hang", {})))
        last = await environment.observe()
        assert (last.agent, last.terminated, last.truncated) == (open_one.agent, True, True)
    with pytest.raises(EpisodeOver):
        await environment.observe()
    assert environment.counts["cut_off"] == 4
    assert not environment._working


async def test_a_subagent_that_the_rollout_cancels_is_over_for_its_parent():
    environment = made()
    await environment.reset(TASK)
    environment.act((await environment.observe()).id, delegates("a", "b"))
    one, two = await shown(environment)
    environment.cancel(one.id)
    environment.act(two.id, says("two"))
    assert (await environment.observe()).agent == "agent/solver-2"
    result = await environment.observe()
    assert [m.text for m in result.content] == ["(no answer: cancelled)", "two"]
    environment.cancel(result.id)
    with pytest.raises(EpisodeOver):
        await environment.observe()


async def test_abandoning_leaves_nothing_running():
    environment = made(Subagent(name="solver", tools=(wait,)))
    await environment.reset(TASK)
    environment.act((await environment.observe()).id, delegates("a", "b"))
    for observation in await shown(environment):
        environment.act(observation.id, calls(("wait", {"seconds": 60})))
    await settle()
    before = asyncio.all_tasks()
    assert len(before) > 1
    await environment.abandon()
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_reward_function_that_fails_is_no_reward():
    environment = made(subagent_reward_fn=lambda task, prompt, answer: float("nan"))
    agent = lambda o: delegates("a") if o.agent == "agent" else says("x")  # noqa: E731
    with pytest.raises(InvalidEnvironment, match="finite"):
        await play(environment, TASK, agent)


def test_what_makes_no_sense_is_said_when_it_is_made():
    with pytest.raises(ValueError, match="two kinds"):
        made(SOLVER, SOLVER)
    with pytest.raises(ValueError, match=r"tools.*'finish'"):
        made(Subagent(name="x", tools=(tool(name="finish")(lambda: 1),)))
    with pytest.raises(ValueError, match="no slash"):
        Subagent(name="a/b")
    for settings in ({"max_depth": 0}, {"max_agents": -1}, {"max_steps": 0}):
        with pytest.raises(ValueError, match="at least"):
            made(**settings)


@pytest.mark.parametrize("results", ["together", "each"])
def test_it_keeps_to_what_environments_have_to_do(results):
    check_environment(
        lambda: made(
            Subagent(name="solver", tools=(Calculator(),)), tools=[Calculator()], results=results, max_depth=2
        ),
        [TASK],
    )


async def test_one_that_is_not_reusable_has_one_episode():
    environment = made()
    await environment.reset(TASK)
    with pytest.raises(Conflict):
        await environment.reset(TASK)


@pytest.fixture
def at_once(monkeypatch):
    """Rewards without threads, so that nothing of an episode takes time."""

    async def here(work, name):
        return work()

    monkeypatch.setattr("palestra.threads.in_thread", here)


@pytest.mark.slow
@given(order=st.permutations(range(5)), count=st.integers(1, 5))
@hypothesis_settings(max_examples=40, deadline=None)
def test_together_the_results_are_in_the_order_of_the_calls(order, count):
    async def episode():
        environment = made()
        await environment.reset(TASK)
        environment.act((await environment.observe()).id, delegates(*map(str, range(count))))
        open_ones = [await environment.observe() for _ in range(count)]
        places = [place for place in order if place < count]
        for place in places:
            environment.act(open_ones[place].id, says(f"result {place}"))
            assert (await environment.observe()).agent == open_ones[place].agent
        result = await environment.observe()
        assert result.tool_outputs == {f"c{k}": f"result {k}" for k in range(count)}
        assert [m.tool_call_id for m in result.content] == [f"c{k}" for k in range(count)]
        environment.act(result.id, says("done"))
        assert (await environment.observe()).terminated

    asyncio.run(episode())


@pytest.mark.slow
@given(data=st.data())
@hypothesis_settings(max_examples=80, deadline=None)
def test_one_by_one_each_result_is_told_once_and_each_call_answered_at_once(data):
    async def here(work, name):
        return work()

    async def episode():
        environment = made(results="each", max_steps=100, tools=[Calculator()])
        await environment.reset(TASK)
        open_ones = {o.agent: o for o in await shown(environment)}
        told_results, finished, turn, started = Counter(), [], 0, 0
        pending: list[str] = []  # ids of the agent's last calls
        while open_ones:
            name = data.draw(st.sampled_from(sorted(open_ones)))
            observation = open_ones.pop(name)
            if name == "agent":
                turn += 1
                more = data.draw(st.integers(0, 2)) if turn < 5 else 0
                own = data.draw(st.booleans()) and turn < 5
                wanted = [("delegate", {"prompt": f"p{started + k}"}) for k in range(more)]
                wanted += [("calculator", {"expression": "1 + 1"})] if own else []
                started += more
                action = calls(*wanted, ids=f"t{turn}-") if wanted else says("done")
                pending = [call.id for call in action.tool_calls]
            else:
                action = says(f"result of {name}")
                finished.append(name)
            environment.act(observation.id, action)
            for seen in await shown(environment):
                if seen.is_last:
                    continue
                assert seen.agent not in open_ones
                open_ones[seen.agent] = seen
                if seen.agent != "agent":
                    continue
                roles = [m.role for m in seen.content]
                assert [m.tool_call_id for m in seen.content if m.role == "tool"] == pending
                assert roles in (["tool"] * len(pending), ["tool"] * len(pending) + ["user"])
                new = [
                    child for child in finished if any(f"result of {child}" in m.text.split("\n") for m in seen.content)
                ]
                assert len(new) <= 1
                told_results.update(new)
                pending = []
        assert told_results == Counter(finished)
        assert len(finished) == started == environment.counts["started"]
        with pytest.raises(EpisodeOver):
            await environment.observe()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("palestra.threads.in_thread", here)
        asyncio.run(episode())


async def test_one_by_one_a_later_result_is_a_message_of_the_user(at_once):
    environment = made(results="each")
    await environment.reset(TASK)
    environment.act((await environment.observe()).id, delegates("a", "b"))
    one, two = await shown(environment)
    environment.act(two.id, says("B"))
    (_, first) = await shown(environment)
    assert told(first) == [("tool", "agent/solver-1 is still at work."), ("tool", "B")]
    environment.act(first.id, says("I wait."))
    assert await shown(environment) == []
    environment.act(one.id, says("A"))
    (_, second) = await shown(environment)
    assert told(second) == [("user", "agent/solver-1 has answered:\nA")]
    environment.act(second.id, says("done"))
    (last,) = await shown(environment)
    assert (last.terminated, last.reward) == (True, 1.0)


async def test_one_by_one_a_result_that_has_come_is_told_with_those_of_other_tools(at_once):
    environment = made(results="each", tools=[Calculator()])
    await environment.reset(TASK)
    environment.act((await environment.observe()).id, delegates("a", "b", "c"))
    solvers = await shown(environment)
    for number, observation in enumerate(solvers[:2]):
        environment.act(observation.id, says(f"result {number}"))
    first = (await shown(environment))[-1]
    environment.act(first.id, calls(("calculator", {"expression": "1 + 1"}), ids="d"))
    (second,) = await shown(environment)
    assert told(second) == [("tool", "2"), ("user", "agent/solver-2 has answered:\nresult 1")]
    environment.act(second.id, calls(("calculator", {"expression": "1 + 2"}), ids="e"))
    (third,) = await shown(environment)  # at once, though a subagent is at work
    assert told(third) == [("tool", "3")]
    await environment.abandon()


async def test_rewards_may_be_asynchronous():
    async def of_subagent(task, prompt, answer):
        await asyncio.sleep(0)
        return 0.5

    async def of_task(task, answer):
        await asyncio.sleep(0)
        return 2.0

    environment = SubagentEnvironment([SOLVER], of_task, subagent_reward_fn=of_subagent)
    turns = iter([delegates("a"), says("done")])
    seen = await play(environment, TASK, lambda o: next(turns) if o.agent == "agent" else says("x"))
    rewards = {o.agent: o.reward for o in seen if o.is_last}
    assert rewards == {"agent": 2.0, "agent/solver-1": 0.5}
