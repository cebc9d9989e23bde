"""A program that speaks chat completions and edits a file is trained with the tokens that were sampled."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from in_process import parts_of, serving, trajectory_of

from palestra.client import AsyncClient
from palestra.client.worker import Worker
from palestra.renderers import ByteTokenizer, ChatMLConfig, ChatMLRenderer
from palestra_harness import Harness, HarnessRollout

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
