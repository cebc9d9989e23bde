"""A job on a task of Harbor's format: a scripted model solves it, and the tokens trained are those sampled."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from dataclasses import replace

import pytest
from in_process import RecordingTrainer, parts_of, serving, trajectory_of
from machine import require

from palestra.renderers import ByteTokenizer, ChatMLConfig, ChatMLRenderer
from palestra_worlds.harbor.catalog import shipped_folder

require("podman", "runc", "busybox")
SOLUTION = """shell echo 'echo "Hello, $1!"' > run.sh"""


@pytest.mark.slow
async def test_a_model_that_solves_a_task_is_trained_with_the_tokens_that_it_sampled(tmp_path):
    tokenizer = ByteTokenizer()
    renderer = ChatMLRenderer(tokenizer, ChatMLConfig(reasons=False))
    solves = itertools.cycle((SOLUTION, "shell ls"))

    def reply(prompt: str, seed: int) -> str:
        return next(solves) if prompt.count("assistant\n") == 1 else "finish done"

    trainer = RecordingTrainer()
    parts = replace(parts_of(renderer, tokenizer, reply), trainer=trainer)
    shutil.copytree(shipped_folder() / "greet", tmp_path / "tasks" / "greet")
    settings = {
        "steps": 1,
        "rollout": {"group_size": 2, "groups_per_step": 1},
        "evaluation": {"every_steps": 0},
        "policies": {"policy": {"max_context": 4096}},
        "environment": {
            "name": "harbor",
            "path": str(tmp_path / "tasks"),
            "settings": {"actions": "text", "command_seconds": 10},
            "validation_tasks": 0,
            "max_concurrency": 2,
        },
    }
    async with serving(tmp_path, parts, **settings) as job:
        await asyncio.wait_for(job.run(), 100)
        played = [await trajectory_of(job, f"train-000000-0{sample}") for sample in range(2)]
    assert sorted(one.episode.reward for one in played) == [0.0, 1.0]
    for one in played:
        assert one.episode.named_rewards == {"reward": one.episode.reward}
        first, last = one.chats
        assert (first.reply.text == SOLUTION, last.reply.text) == (one.episode.reward == 1.0, "finish done")
        assert last.parent is first
        assert last.fork is None
        sampled = [token for chat in one.chats for token in chat.completion_ids.tolist()]
        (row,) = [row for row in trainer.rows if row.episode_id == one.episode.episode_id]
        assert row.ids[row.loss_mask].tolist() == sampled
