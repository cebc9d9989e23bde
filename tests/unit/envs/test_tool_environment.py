"""The calculator over two turns, through a session: calls, results, `finish`, and the reward."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from palestra.config import JobConfig
from palestra.envs import SerialEnvironment, TaskEnvironment, ToolEnvironment, reward_function
from palestra.errors import ConfigError, InvalidEnvironment, NotScored
from palestra.rollout import RolloutSpec
from palestra.runners import Runner
from palestra.runtime.arguments import Play, resolve_rollout
from palestra.session import Sessions
from palestra.tools import Calculator
from unit.building import TASK, FakeClock
from unit.envs.playing import calls, play, says
from unit.session.conftest import STOP, Bench


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def exact(task, answer):
    return float(answer == task["answer"])


async def played(tmp_path, replies, **settings):
    """An episode in which the model says `replies`, one after another."""
    bench = Bench(tmp_path, FakeClock(), sampling={"max_tokens": 200})
    left = iter(replies)
    bench.script = lambda prompt, sampling: [*next(left).encode(), STOP]
    task = type(TASK)(task_id="t", data={"prompt": "17 * 23?", "answer": "391"})
    await bench.store.groups.register("train", 0, 1, task, 1)

    def make():
        return ToolEnvironment([Calculator()], exact, system="Use the calculator.", **settings)

    trajectory = await Runner(Sessions(bench.context, 10), RolloutSpec(environment=make)).play_episode()
    bench.store.close()
    return trajectory


async def test_a_call_its_result_and_the_answer(tmp_path):
    trajectory = await played(tmp_path, [call("calculator", expression="17 * 23"), call("finish", answer="391")])
    assert [m.role for m in trajectory.chats[-1].messages] == ["system", "user", "assistant", "tool"]
    assert trajectory.chats[-1].messages[-1].text == "391"
    assert trajectory.chats[1].extends is trajectory.chats[0]
    assert {tool["function"]["name"] for tool in trajectory.chats[0].tools} == {"calculator", "finish"}
    assert trajectory.episode.step_rewards == (0.0, 1.0)
    assert trajectory.episode.metadata["termination"] == "done"


async def test_an_answer_without_a_call_counts_and_a_broken_call_can_be_put_right(tmp_path):
    assert (await played(tmp_path / "a", ["391"])).episode.reward == 1.0
    replies = [call("finish", result=391), call("calculater", expression="1"), call("finish", answer="391")]
    trajectory = await played(tmp_path / "b", replies)
    told = [m.text for m in trajectory.chats[-1].messages if m.role == "tool"]
    assert "'answer' is missing" in told[0]
    assert "no tool 'calculater'" in told[1]
    assert trajectory.episode.reward == 1.0


async def test_too_many_steps_are_a_truncation_scored_by_what_was_said(tmp_path):
    trajectory = await played(tmp_path, [call("calculator", expression="1")] * 3, max_steps=3)
    assert trajectory.episode.metadata["termination"] == "max_steps"
    assert (trajectory.episode.reward, len(trajectory.chats)) == (0.0, 3)
    environment = ToolEnvironment([Calculator()], exact, max_steps=2)
    turn = calls(("calculator", {"expression": "1"}), text="391")
    seen = await play(environment, {"prompt": "17 * 23?", "answer": "391"}, lambda observation: turn)
    assert [(o.reward or 0.0, o.truncated, o.tool_outputs) for o in seen] == [
        (0.0, False, {}),
        (0.0, False, {"c0": "1"}),
        (1.0, True, {}),
    ]
    with pytest.raises(ValueError, match="least 1"):
        ToolEnvironment([], exact, max_steps=0)


def test_reward_functions_of_trl_are_taken_as_they_are():
    def length(completions, answer, **kwargs):
        assert kwargs["prompts"] == ["1 + 1?"]
        return [len(c) + len(a) for c, a in zip(completions, answer, strict=True)]

    def plain(completions):
        return [1] * len(completions)

    task = {"prompt": "1 + 1?", "answer": "two"}
    assert reward_function(length)(task, "2") == 4.0
    assert reward_function(plain)(task, "2") == 1.0
    environment = TaskEnvironment(length)
    assert environment.reset(task)[0] == "1 + 1?"
    assert environment.step("22")[1:4] == (5.0, True, False)


def test_a_reward_function_that_needs_what_only_trl_has_is_refused_before_an_episode():
    def short(completions, completion_ids, trainer_state, **kwargs):
        return [0.0]

    with pytest.raises(InvalidEnvironment, match=r"trainer_state.*TRL"):
        reward_function(short)
    with pytest.raises(ConfigError, match=r"`reward`.*trainer_state"):
        resolve_rollout(JobConfig(), Play(reward=short))
    assert reward_function(lambda completions, completion_ids=None: [1.0])({}, "") == 1.0
    assert reward_function(lambda task, completion_ids: 1.0)({}, "") == 1.0  # an argument's name in Palestra's form


def test_none_is_no_reward_and_no_mistake():
    with pytest.raises(NotScored):
        reward_function(lambda task, answer: None)({}, "")
    with pytest.raises(NotScored):
        reward_function(lambda completions: [None])({}, "")


@pytest.mark.parametrize("value", ["much", float("nan"), [1.0]])
def test_what_is_no_reward_is_an_error_and_not_zero(value):
    with pytest.raises(InvalidEnvironment):
        reward_function(lambda task, answer: value)({}, "")
    with pytest.raises(InvalidEnvironment):
        reward_function(lambda completions: [value, value])({}, "")


async def test_reward_functions_may_be_asynchronous():
    threads = []

    async def length(completions, answer):
        await asyncio.sleep(0)
        threads.append(threading.current_thread().name)
        return [float(len(completions[0]) + len(answer[0]))]

    class Scorer:
        async def __call__(self, task, answer):
            threads.append(threading.current_thread().name)
            return 3

    here = threading.current_thread().name
    task = {"prompt": "1 + 1?", "answer": "two"}
    assert await reward_function(length)(task, "2") == 4.0
    seen = await play(SerialEnvironment(TaskEnvironment(length)), task, lambda observation: says("22"))
    assert seen[-1].reward == 5.0
    for reward in (Scorer(), lambda task, answer: 3):
        seen = await play(ToolEnvironment([], reward), task, lambda observation: says("22"))
        assert seen[-1].reward == 3.0
    assert threads == [here] * 3


async def test_what_an_asynchronous_reward_function_returns_is_checked():
    async def much(task, answer):
        return "much"

    with pytest.raises(InvalidEnvironment, match=r"much.*'much'"):
        await play(ToolEnvironment([], much), {"prompt": "?"}, lambda observation: says("22"))


class Paying(ToolEnvironment):
    """Pays for each result that is no mistake, beside the answer."""

    def score_results(self, task, results):
        return sum(task["pay"] for one in results if one.failure is None)


class PayingLater(Paying):
    async def score_results(self, task, results):
        return super().score_results(task, results)


@pytest.mark.parametrize("kind", [Paying, PayingLater])
async def test_results_of_tools_can_be_paid_for(kind):
    two = calls(("calculator", {"expression": "1"}), ("calculator", {"expression": "2"}))
    turns = iter([two, calls(("calculator", {"expression": "1/"})), says("391")])
    environment = kind([Calculator()], exact)
    seen = await play(environment, {"prompt": "?", "answer": "391", "pay": 0.25}, lambda observation: next(turns))
    assert [one.reward for one in seen] == [None, 0.5, 0.0, 1.0]


async def test_a_wrong_reward_of_results_is_an_error():
    environment = Paying([Calculator()], exact)
    turn = calls(("calculator", {"expression": "1"}))
    with pytest.raises(InvalidEnvironment, match="finite"):
        await play(environment, {"prompt": "?", "answer": "1", "pay": float("nan")}, lambda observation: turn)


async def test_score_may_be_asynchronous():
    class Judged(ToolEnvironment):
        async def score(self, task, answer):
            await asyncio.sleep(0)
            return 0.25

    seen = await play(Judged([], exact), {"prompt": "?"}, lambda observation: says("22"))
    assert seen[-1].reward == 0.25


def right(task, answer):
    return answer == task["answer"]


def test_a_reward_function_may_return_rewards_by_name():
    scored = reward_function(lambda task, answer: {"right": True, "length": len(answer), "style": None})
    assert scored({}, "two") == {"right": 1.0, "length": 3.0, "style": None}
    environment = TaskEnvironment(lambda task, answer: {"right": 1, "style": None})
    environment.reset({"prompt": "?"})
    assert environment.step("x")[1:4] == ({"right": 1.0, "style": None}, True, False)


async def test_several_reward_functions_give_rewards_by_their_names():
    def length(completions, **columns):  # in TRL's form
        assert columns["answer"] == ["two"]
        return [len(completions[0])]

    async def style(task, answer):
        await asyncio.sleep(0)

    task = {"prompt": "1 + 1?", "answer": "two"}
    assert reward_function({"right": right, "length": length})(task, "two") == {"right": 1.0, "length": 3.0}
    several = {"right": right, "length": length, "style": style}
    assert await reward_function(several)(task, "two") == {"right": 1.0, "length": 3.0, "style": None}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, r"1.*32.*0"),
        ({"a/b": 1.0}, "'a/b'"),
        ({"": 1.0}, "'' does"),
        ({"a\n": 1.0}, "does not"),
        ({3: 1.0}, "3 does"),
        ({"right": "yes"}, r"'right'.*'yes'"),
        ({"right": float("nan")}, r"'right'.*nan"),
        ({"right": {"a": 1.0}}, "no reward"),
        ({f"n{number}": 1.0 for number in range(33)}, r"1.*32.*33"),
    ],
)
def test_what_is_no_reward_by_name_is_an_error(value, said):
    with pytest.raises(InvalidEnvironment, match=said):
        reward_function(lambda task, answer: value)({}, "")


def test_functions_by_name_return_a_number_each_and_have_names_that_fit():
    with pytest.raises(InvalidEnvironment, match=r"'right'.*returned.*{'a'.*1.0}"):
        reward_function({"right": lambda task, answer: {"a": 1.0}})({}, "")
    with pytest.raises(ConfigError, match=r"`reward`.*reward's"):
        resolve_rollout(JobConfig(), Play(reward={"a/b": right}))
    with pytest.raises(ConfigError, match=r"`reward`.*dict.*dict"):
        resolve_rollout(JobConfig(), Play(reward={"right": 1.0}))


def test_a_text_and_what_was_not_awaited_are_no_rewards():
    async def score():
        return 1.0

    with pytest.raises(InvalidEnvironment, match=r"'1\.0'"):
        reward_function(lambda task, answer: "1.0")({}, "")
    pending = score()
    with pytest.raises(InvalidEnvironment, match=r"reward.*awaited"):
        reward_function(lambda task, answer: pending)({}, "")
    pending.close()
