"""What reward functions are told by name, in Palestra's form and in TRL's, and which names are refused."""

from __future__ import annotations

import asyncio

import pytest

import palestra
from palestra import JobConfig
from palestra.envs.rewards import FACTS, reward_facts, reward_function
from palestra.errors import ConfigError, InvalidEnvironment
from palestra.types.messages import text_message
from unit.building import ids, make_chat

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def chat(**changes):
    return make_chat("e", **changes)


def test_the_facts_are_those_of_the_calls():
    first, last = chat(), chat(index=1, finish_reason="length")
    found = reward_facts([first, last])
    assert tuple(found) == FACTS
    assert (found["finish_reason"], found["calls"]) == ("length", (first, last))
    assert found["completion_ids"] == last.completion_ids.tolist()
    assert found["completion_tokens"] == len(first.completion_ids) + len(last.completion_ids)
    assert found["prompt_tokens"] == first.prompt_tokens + last.prompt_tokens
    assert found["messages"][-1] == {"role": "assistant", "content": last.reply.text}
    assert reward_facts([]) == {}


def test_tokens_that_a_worker_elsewhere_does_not_know_are_not_counted_as_0():
    found = reward_facts([chat(versions=(), completion_ids=ids())])
    assert set(found) == {"finish_reason", "messages", "calls"}


def by_name(task, answer, *, finish_reason, completion_tokens):
    return (finish_reason == "stop") + completion_tokens / 100


def by_place(row, text, finish_reason, messages=None):
    return float(finish_reason == "stop" and messages[-1]["content"] != "")


def with_all(task, answer, **facts):
    return float(set(facts) == set(FACTS))


async def later(task, answer, *, finish_reason):
    await asyncio.sleep(0)
    return float(finish_reason == "stop")


def of_trl(completions, finish_reason, completion_ids, answer):
    return [float(finish_reason == ["stop"] and len(completion_ids[0]) > 0 and answer == ["2"])]


@pytest.mark.parametrize("function", [by_name, by_place, with_all, of_trl])
def test_a_function_gets_what_it_asks_for(function):
    assert reward_function(function)({"answer": "2"}, "2", [chat()]) >= 1.0
    assert reward_function({"a": function, "b": by_name})({"answer": "2"}, "2", [chat()])["a"] >= 1.0


async def test_an_asynchronous_function_does_as_well():
    assert await reward_function(later)({}, "2", [chat()]) == 1.0
    assert await reward_function({"a": later, "b": by_name})({}, "2", [chat()]) == {"a": 1.0, "b": pytest.approx(1.02)}


def test_a_column_of_the_task_goes_before_a_fact_in_trls_form():
    seen = []

    def reward(completions, messages, **columns):
        seen.append((messages, columns["finish_reason"]))
        return [0.0]

    reward_function(reward)({"messages": "mine"}, "2", [chat()])
    assert seen == [(["mine"], ["stop"])]


@pytest.mark.parametrize("function", [lambda task, answer, level: 1.0, lambda task, answer, *, finish: 1.0])
def test_an_unknown_name_that_is_needed_is_refused_with_those_that_there_are(function):
    with pytest.raises(InvalidEnvironment, match=r"finish_reason.*calls"):
        reward_function(function)
    assert reward_function(lambda task, answer, level=3: float(level))({}, "") == 3.0


def test_a_fact_that_is_not_known_is_an_error_unless_it_has_a_default():
    with pytest.raises(InvalidEnvironment, match="finish_reason"):
        reward_function(by_name)({}, "2")
    assert reward_function(lambda task, answer, finish_reason=None: 1.0)({}, "2") == 1.0


def config(folder):
    return JobConfig.model_validate(
        {"run_dir": folder, "steps": 1, "engine": {"kind": "fake", "reply_tokens": 3},
         "rollout": {"group_size": 2, "groups_per_step": 1}, "environment": {"system": "The job's."}}
    )  # fmt: skip


def test_a_column_that_no_task_has_is_refused_before_the_job(tmp_path):
    with pytest.raises(ConfigError, match="'level'"):
        palestra.train(
            reward=lambda completions, level: [1.0], tasks=[{"prompt": "?"}], config=config(tmp_path / "run")
        )


def test_conversations_are_asked_as_they_are_and_trls_reward_gets_lists_of_messages(tmp_path):
    seen = []

    def reward(prompts, completions, finish_reason, messages, **columns):
        seen.append((prompts, completions, finish_reason, messages))
        return [1.0]

    palestra.train(reward=reward, tasks=[{"prompt": TALK}], config=config(tmp_path / "run"), quiet=True)
    for prompts, completions, finish_reason, messages in seen:
        assert prompts == [TALK]
        assert messages[0][:2] == TALK, "the conversation's own system message, and no other"
        assert completions == [[messages[0][2]]]
        assert finish_reason[0] in ("stop", "length")
    assert len(seen) == 2


@pytest.mark.parametrize(
    "prompt",
    [[], [3], [{"role": "user"}, {"content": "x"}], [*TALK, {"role": "assistant", "content": "2"}], {"a": 1}, None],
)
def test_what_is_no_conversation_is_refused_before_the_job(tmp_path, prompt):
    with pytest.raises(ConfigError, match=r"`tasks`.*0"):
        palestra.train(reward=by_place, tasks=[{"prompt": prompt}], config=config(tmp_path / "run"))


def test_a_conversation_without_a_system_message_gets_the_jobs(tmp_path):
    seen = []
    palestra.train(
        reward=lambda task, answer, messages: float(seen.append(messages) or 1.0),
        tasks=[{"prompt": TALK[1:]}],
        config=config(tmp_path / "run"),
        quiet=True,
    )
    assert seen[0][:2] == [{"role": "system", "content": "The job's."}, TALK[1]]
    assert text_message("user", "1 + 1?").text == seen[0][1]["content"]
