"""A program that speaks chat completions and edits a file is trained with the tokens that were sampled."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx2
import pytest
from in_process import parts_of, serving, trajectory_of

import palestra
from palestra.client import AsyncClient
from palestra.client.worker import Worker
from palestra.config import JobConfig, load_saved_config
from palestra.errors import ConfigError, RolloutFailed
from palestra.renderers import ByteTokenizer, ChatMLConfig, ChatMLRenderer
from palestra.types.records import Task
from palestra_harness import Harness, HarnessRollout

pytestmark = pytest.mark.ci

CODER = Path(__file__).parents[1] / "unit" / "harness" / "coder.py"
SETTINGS = {"rollout": {"group_size": 2, "groups_per_step": 1}, "steps": 1, "evaluation": {"every_steps": 0}}


async def test_a_program_plays_the_episodes_of_a_job_and_is_scored_by_what_it_wrote(tmp_path: Path):
    tokenizer = ByteTokenizer()
    renderer = ChatMLRenderer(tokenizer, ChatMLConfig(reasons=False))
    parts = parts_of(renderer, tokenizer, lambda prompt, seed: "hello " + "ab"[seed % 2])
    harness = Harness(
        name="coder",
        command=(sys.executable, str(CODER), "{base_url}", "{task}"),
        variables={"KEY": "{api_key}", "MODEL": "{model}"},
        files={"settings.json": '{"model": "{model}"}'},
    )
    written = []

    def score(task, result):
        written.append(((result.workspace / "hello.txt").read_text(), result.output))
        return float(len(written))

    async with serving(tmp_path, parts, **SETTINGS) as job:
        running = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key) as client:
            await client.push_tasks([{"prompt": "Say hello."}])
            await Worker(client, HarnessRollout(harness, score), 2).run()
        await running
        played = [await trajectory_of(job, f"train-000000-0{sample}") for sample in range(2)]
    assert sorted(one.episode.reward for one in played) == [1.0, 2.0]
    assert {text for text, _ in written} == {one.chats[0].reply.text for one in played}
    for text, output in written:
        assert output == f"policy says {text}\n"
    for one in played:
        (chat,) = one.chats
        assert chat.messages[0].text == "Say hello."
        assert bytes(chat.completion_ids.tolist()[:-1]).decode() == chat.reply.text
        assert one.episode.metadata["harness"] == "coder"


CALLS = """
import json, os, sys, urllib.error, urllib.request
for more in json.loads(sys.argv[2]):
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | more
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    request = urllib.request.Request(sys.argv[1] + "/chat/completions", json.dumps(body).encode(), headers)
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        print(error)
sys.exit("failed")
"""


@pytest.mark.parametrize(("calls", "plays"), [("[]", False), ("[{}]", True), ('[{"chat_template": "x"}]', True)])
async def test_a_program_that_fails_is_scored_only_if_it_has_called_the_model(tmp_path: Path, calls: str, plays: bool):
    command = (sys.executable, "-c", CALLS, "{base_url}", calls)
    harness = Harness(name="failing", command=command, variables={"KEY": "{api_key}"})
    scored = []

    def score(task, result):
        scored.append(result.exit_code)
        return 0.0

    async with serving(tmp_path, **SETTINGS) as job, AsyncClient(job.url, job.api_key) as client:
        await job.plane.store.groups.register("train", 0, 1, Task(task_id="t", data={"prompt": "x"}), 2)
        episode = await client.begin_episode()
        assert episode is not None
        rollout = HarnessRollout(harness, score)
        if plays:
            assert (await rollout(episode.task, episode.policy)).reward == 0.0
        else:
            with pytest.raises(RolloutFailed, match=r"code.*1"):
                await rollout(episode.task, episode.policy)
    assert scored == [1] * plays


async def test_only_the_key_of_an_episode_counts_its_calls(tmp_path: Path):
    async with serving(tmp_path, **SETTINGS) as job, httpx2.AsyncClient(base_url=job.url) as http:
        for key, status in ((job.api_key, 403), ("pe-wrong", 401)):
            answer = await http.get("/episode_calls", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status


def test_a_program_is_trained_with_by_name_of_the_argument_and_scored_by_the_reward(tmp_path: Path):
    harness = Harness(
        name="coder",
        command=(sys.executable, str(CODER), "{base_url}", "{task}"),
        variables={"KEY": "{api_key}", "MODEL": "{model}"},
        files={"settings.json": '{"model": "{model}"}'},
    )
    config = JobConfig(run_dir=tmp_path / "run", engine={"kind": "fake"}, **SETTINGS)
    seen = []

    def reward(task, result):
        seen.append((task["prompt"], (result.workspace / "hello.txt").read_text() == result.answer))
        return float(len(seen))

    found = palestra.train(harness=harness, reward=reward, tasks=[{"prompt": "Say hello."}], config=config, quiet=True)
    assert found.state == "completed"
    assert seen == [("Say hello.", True)] * 2
    assert found.metrics[-1]["train/reward_mean"] == 1.5
    assert load_saved_config(tmp_path / "run").harness.name == "coder"


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({}, {"harness": "codx", "reward": len}, "codex"),
        ({}, {"harness": 7, "reward": len}, "int"),
        ({"harness": {"name": "pi"}}, {"harness": "codex", "reward": len}, "leave one out"),
        ({"harness": {"name": "pi", "score": "s.py"}}, {"reward": len}, "leave one out"),
        ({"harness": {"name": "pi"}}, {}, "harness.score"),
        ({"harness": {"name": "pi"}}, {"reward": {"a": len}}, "one function"),
        ({"harness": {"name": "pi"}}, {"rollout": lambda task, endpoint: 1.0}, "rollout and harness"),
    ],
)
def test_what_is_wrong_with_a_harness_is_said_before_anything_is_loaded(tmp_path, settings, arguments, said):
    config = JobConfig(run_dir=tmp_path / "run", engine={"kind": "fake"}, **settings)
    with pytest.raises(ConfigError, match=said):
        palestra.train(tasks=[{"prompt": "x"}], config=config, quiet=True, **arguments)
    assert not (tmp_path / "run").exists()


def test_a_task_without_a_prompt_is_refused_before_it_is_played(tmp_path):
    harness = Harness(name="own", command=(sys.executable,))
    with pytest.raises(ConfigError, match="prompt"):
        palestra.train(harness=harness, reward=len, tasks=[{"text": "x"}], quiet=True)
