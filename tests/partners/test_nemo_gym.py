"""`NemoGymEnvironment` with resources servers that ship with NeMo Gym, and rows of their own data."""

from __future__ import annotations

import asyncio
import json

import pytest
from unit.envs.playing import calls, play, says

from palestra.errors import EnvironmentFailed
from palestra_inspect.environment_check import check_environment
from palestra_worlds import NemoGymEnvironment
from partners.environment import FOLDER, free_port, running

pytestmark = [pytest.mark.partners, pytest.mark.timeout(300)]


def rows(package: str) -> list[dict]:
    """Return the example rows that the wheel has."""
    (found,) = (FOLDER / "nemo-gym").glob(f"lib/python*/site-packages/resources_servers/{package}/data/example.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


@pytest.fixture
def served(request):
    package, name = request.param
    port = free_port()
    with running("nemo-gym", "nemo_gym_server.py", package, name, str(port), port=port):
        yield package, f"http://127.0.0.1:{port}"


async def played(environment, task, *actions):
    left = iter(actions)
    try:
        return await play(environment, task, lambda observation: next(left))
    finally:
        await environment.close()


COUNTER = ("example_session_state_mgmt", "StatefulCounterResourcesServer")
CHOICE = ("mcqa", "MCQAResourcesServer")


@pytest.mark.parametrize("served", [COUNTER], indirect=True)
async def test_a_server_with_tools_and_a_session(served):
    package, url = served
    task = rows(package)[0]  # "add 1 then add 2 then get the count", from 3
    assert task["expected_count"] == 6
    environment = NemoGymEnvironment(url)
    turns = (
        calls(("increment_counter", {"count": 1}), ("increment_counter", {"count": 2})),
        calls(("get_counter_value", {})),
    )
    seen = await played(environment, task, *turns, says("6"))
    assert seen[0].content[0].text == "add 1 then add 2 then get the count"
    assert seen[2].content[0].text == '{"count":6}'
    assert seen[-1].reward == 1.0
    # Another session begins where its own row says.
    assert (await played(environment, task, calls(("get_counter_value", {})), says("?")))[-1].reward == 0.0
    wrong = await played(environment, task, calls(("increment_counter", {"count": "x"})), says("?"))
    assert "int_parsing" in wrong[1].content[0].text
    await asyncio.to_thread(check_environment, lambda: NemoGymEnvironment(url, max_steps=2), [task])


@pytest.mark.parametrize("served", [CHOICE], indirect=True)
async def test_a_verifier_of_answers(served):
    package, url = served
    task = rows(package)[0]
    right = task["expected_answer"]
    others = [letter for letter in "ABCD" if letter != right]
    seen = await played(NemoGymEnvironment(url), task, says(f"I choose \\boxed{{{right}}}"))
    assert (seen[-1].reward, seen[-1].info["extracted_answer"]) == (1.0, right)
    seen = await played(NemoGymEnvironment(url), task, says(f"I choose \\boxed{{{others[0]}}}"))
    assert seen[-1].reward == 0.0
    with pytest.raises(EnvironmentFailed, match=r"/seed_session|/verify answers 422"):
        await played(NemoGymEnvironment(url), {**task, "options": 3}, says("A"))
