"""The coding agents that are installed here are trained with what was sampled; `make harnesses` installs them all."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest
from in_process import RecordingTrainer, serving, trajectory_of

from palestra.client import AsyncClient
from palestra.client.worker import Worker
from palestra.config import parse_config
from palestra.engine.fake import FakeEngine
from palestra.errors import ConfigError
from palestra_harness import HarnessRollout, known_harnesses, scripted
from palestra_harness.checking import CONTEXT, REPLY, TASK

# What a context of 8,192 tokens leaves a lean form room for, with its first prompt.
MOST_OF_LEAN = 4096
SETTINGS = {
    "steps": 1,
    "rollout": {"group_size": 2, "groups_per_step": 1},
    "evaluation": {"every_steps": 0},
    "server": {"port": 0, "unknown_fields": "ignore"},
    "policies": {"policy": {"max_context": CONTEXT, "sampling": {"max_tokens": REPLY}}},
}


class RecordingEngine(FakeEngine):
    """Keeps each reply by the ids before it."""

    replies: dict[tuple[int, ...], tuple[int, ...]]

    async def generate(self, request):
        key = tuple(request.prompt.ids.tolist())
        self.replies[key] = ()
        async for piece in super().generate(request):
            self.replies[key] += piece.ids
            yield piece


def trained_replies(row) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The trained parts of a row by the ids before them."""
    ids, found, at = row.ids.tolist(), {}, 0
    for trained, part in groupby(row.loss_mask.tolist()):
        length = len(list(part))
        if trained:
            found[tuple(ids[:at])] = tuple(ids[at : at + length])
        at += length
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(known_harnesses()))
async def test_what_is_trained_through_an_installed_harness_is_what_was_sampled(tmp_path, monkeypatch, name):
    harness = known_harnesses()[name]
    try:
        harness.find_program()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(scripted, "FakeEngine", RecordingEngine)
    monkeypatch.setattr(RecordingEngine, "replies", {}, raising=False)
    parts, _ = scripted.scripted_parts(
        parse_config({"run_dir": str(tmp_path), "engine": {"kind": "fake"}}), harness.script
    )
    trainer, scored = RecordingTrainer(), []

    def score(task, result) -> float:
        assert (result.workspace / scripted.FILE).read_text().strip() == scripted.WORD, result.output
        assert not result.refused, result.output
        scored.append(result)
        return float(len(scored))

    async with serving(tmp_path, replace(parts, trainer=trainer), **SETTINGS) as job:
        running = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key) as client:
            await client.push_tasks([{"prompt": TASK}])
            worker = Worker(client, HarnessRollout(harness, score), 1)
            await worker.run()
        await running
        played = [await trajectory_of(job, f"train-000000-0{sample}") for sample in range(2)]
    assert (len(scored), worker.counts["failed"]) == (2, 0)
    for one in played:
        chats = [chat for chat in one.chats if not chat.agent.endswith("/auxiliary")]
        assert not Counter(chat.fork.reason for chat in chats[1:] if chat.fork is not None)
        (row,) = [row for row in trainer.rows if row.episode_id == one.episode.episode_id]
        trained = trained_replies(row)
        assert len(trained) == len(chats)
        assert trained.items() <= RecordingEngine.replies.items()
        if name.endswith("-lean"):
            assert chats[0].prompt_tokens < MOST_OF_LEAN
