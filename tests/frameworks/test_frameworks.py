"""Agents of nine frameworks, as their users write them, against the real server; what is recorded, token by token."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from integration.in_process import renderer_of
from rendering import render_ids
from unit.building import rows_of

from frameworks.cases import (
    CUT,
    EXACT,
    FORGETFUL,
    HANDOFFS,
    LOW_LIMIT,
    NAMES,
    OFFERS,
    OTHER_TALKS,
    TALKS,
    TEAMS,
    THINKING,
    WIRES,
    Case,
)
from frameworks.playing import AgentFailed, Played, missing, play, play_script, train
from frameworks.shopkeeper import shopkeeper, verbose_shopkeeper

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(missing() is not None, reason=f"{missing()}; `make frameworks` makes it"),
]
ANSWERS = ("It  is 150.\n", "It  is 130.\n", "You  are welcome – é! 👩‍💻 ")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "frameworks.md"
EXAMPLES = re.compile(r"```python\n(.*?)```", re.S)
RUN_EXAMPLE = """
import argparse, asyncio, json
parser = argparse.ArgumentParser()
for name in ("--base-url", "--api-key", "--model"):
    parser.add_argument(name)
print(json.dumps({"answers": [asyncio.run(play(parser.parse_args()))]}))
"""
RESULTS = ["3 x lamp = 60", "2 x chair = 90", "150", "1 x desk = 130"]


def each(cases: tuple[Case, ...]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def rendered_anew(played: Played) -> list[int]:
    """The last prompt, if it were made of its messages alone."""
    last = played.chats[-1]
    messages = [message.model_dump(exclude_none=True) for message in last.messages]
    for message in messages:
        message["content"] = "".join(part["text"] for part in message["content"])
    return list(render_ids(renderer_of("tiny-random")[0], messages, tools=list(last.tools), add_generation_prompt=True))


def results(played: Played) -> list[str]:
    """What tools returned, as the last call saw it."""
    prompt = renderer_of("tiny-random")[1].decode(played.chats[-1].prompt_ids.tolist())
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.S)


def one_row(played: Played) -> None:
    """Each call starts with the exact ids of the one before, and all sampled tokens are in one row."""
    assert all(later.extends is earlier for earlier, later in pairwise(played.chats))
    (row,) = rows_of(played.chats)
    assert int(row.loss_mask.sum()) == sum(len(chat.completion_ids) for chat in played.chats)


@each(TALKS)
async def test_a_conversation_with_tools_is_one_row_of_exact_tokens(tmp_path, case):
    played = await case.play(tmp_path)
    assert played.answers == ANSWERS
    assert len(played.sent) == len(played.chats) == 6
    assert results(played) == RESULTS
    assert [chat.time_step for chat in played.chats] == [0, 0, 0, 1, 1, 2]  # as the agent's headers say
    assert played.forks == [None] * 6
    one_row(played)
    assert rendered_anew(played) != played.chats[-1].prompt_ids.tolist()  # the control: the tokens could have changed
    assert {request.body.get("stream", False) for request in played.sent} == {"streamed" in case.wire}


@each(OTHER_TALKS)
async def test_what_other_frameworks_send_back_is_exact_or_a_fork_that_is_expected(tmp_path, case):
    played = await case.play(tmp_path)
    assert played.answers == (ANSWERS[:1] if case.framework == "crewai" else ANSWERS)
    assert played.forks == list(case.forks)
    assert {request.body.get("stream", False) for request in played.sent} == {"streamed" in case.wire}
    if case.forks == EXACT:
        one_row(played)


@each(THINKING)
async def test_what_a_model_thought_is_kept_or_a_fork_says_that_it_was_not(tmp_path, case):
    played = await case.play(tmp_path)
    assert played.answers == ANSWERS
    assert played.forks == list(case.forks)
    if played.drifted == 0:
        one_row(played)
        assert renderer_of("tiny-random")[1].decode(played.chats[-1].prompt_ids.tolist()).count("<think>") == 5


@each(TEAMS)
async def test_a_subagent_has_its_name_and_a_conversation_of_its_own(tmp_path, case):
    played = await case.play(tmp_path)
    assert played.answers == ("It  is 60 and 90.\n",)
    assert played.forks == list(case.forks)
    assert [chat.agent for chat in played.chats] == ["planner", *["planner/clerk"] * 4, "planner"]
    assert played.drifted == 0
    assert len(rows_of(played.chats)) == 3


@each(FORGETFUL)
async def test_an_agent_that_sends_less_of_its_history_forks_there(tmp_path, case):
    played = await case.play(tmp_path)
    assert played.answers == ANSWERS
    assert played.forks == list(case.forks)
    assert len(rows_of(played.chats)) == 3


@each(OFFERS)
async def test_an_answer_can_be_an_object(tmp_path, case):
    played = await case.play(tmp_path)
    assert [json.loads(answer) for answer in played.answers] == [{"item": "lamp", "total": 60}]
    assert played.forks == list(case.forks)
    one_row(played)


@each(CUT)
async def test_a_conversation_goes_on_from_a_reply_that_was_cut(tmp_path, case):
    played = await case.play(tmp_path)
    assert played.forks == list(case.forks)
    one_row(played)


@pytest.mark.parametrize("streamed", [(), ("--streamed",)])
async def test_the_agents_sdk_refuses_a_cut_reply_over_responses(tmp_path, streamed):
    options: Any = {"folder": tmp_path, "reply": verbose_shopkeeper, **LOW_LIMIT}
    with pytest.raises(AgentFailed, match=r"ModelBehaviorError.*max_output_tokens"):
        await play("openai_agents", "talk", "--api", "responses", *streamed, **options)


@each(HANDOFFS)
async def test_an_agent_that_takes_over_changes_the_instructions_and_forks(tmp_path, case):
    played = await case.play(tmp_path)
    assert played.answers == ANSWERS[:1]
    assert played.forks == list(case.forks)
    assert len(rows_of(played.chats)) == 2


@pytest.mark.parametrize("framework", NAMES)
async def test_a_job_is_trained_on_episodes_of_an_unchanged_agent(tmp_path, framework):
    answers = await train(framework, folder=tmp_path, reply=shopkeeper, episodes=2)
    assert answers == [ANSWERS] * 2
    (step,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert step["train/rows"] == 2
    assert step["rollout/drift_share"] == 0
    assert step["rollout/reused_tokens"] > 0.5 * step["rollout/prompt_tokens"]


@pytest.mark.parametrize("number", range(3))
async def test_the_examples_of_the_documentation_run(tmp_path, number):
    example = EXAMPLES.findall(PAGE.read_text())[number]
    script = tmp_path / "example.py"
    script.write_text(example + RUN_EXAMPLE)
    played = await play_script(script, folder=tmp_path, reply=shopkeeper)
    assert played.answers == ("It  is 60.\n",)
    assert played.forks == [None, None]


@pytest.mark.model
@pytest.mark.parametrize(
    ("framework", "wire"),
    [
        ("openai_agents", "chat"),
        ("openai_agents", "responses, streamed"),
        ("langgraph", "chat, streamed"),
        ("pydantic_ai", "chat"),
    ],
)
async def test_a_real_model_that_has_to_use_tools_has_no_drift(tmp_path, framework, wire):
    sampling = {"max_tokens": 250, "temperature": 0.1}  # so that this small model ends what it says
    settings: Any = {
        "policies": {"policy": {"model": "SmolLM2-135M-Instruct", "max_context": 4096, "sampling": sampling}},
        "engine": {"kind": "embedded", "threads": 1},
        "deterministic": True,
    }
    played = await play(framework, "talk", *WIRES[wire], "--force", folder=tmp_path, **settings)
    assert len(played.answers) == 3
    assert len(played.chats) == len(played.sent) >= 6
    assert played.forks == [None] * len(played.chats)
    one_row(played)
    asked = [chat for chat in played.chats if chat.messages[-1].role == "user"]
    assert [len(chat.reply.tool_calls) for chat in asked] == [1, 1, 1]
    calls = [call for chat in played.chats for call in chat.reply.tool_calls]
    told = [message.text for message in played.chats[-1].messages if message.role == "tool"]
    assert len(told) == len(calls)
    assert all(re.fullmatch(r"\d x (lamp|chair|desk) = \d+|\d+", text) for text in told)
