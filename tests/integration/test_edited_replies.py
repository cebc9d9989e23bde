"""Constrained replies that the agent sends back edited: the job trains them, and one odd episode does not end it."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import safetensors.torch
import torch
from servers import KEY, TINY, Job

from palestra import Client
from palestra.client import Episode

WORD = {
    "type": "object",
    "properties": {"x": {"type": "string", "minLength": 6, "maxLength": 9}},
    "required": ["x"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a model that was never trained would say nothing else
}
SETTINGS = TINY | {"steps": 1, "rollout": {"group_size": 2, "groups_per_step": 1}, "evaluation": {"every_steps": 0}}
EDITS = (
    lambda reply: reply[: len(reply) // 2] + "!",  # cut; what follows sorts before the rest of the reply
    lambda reply: json.dumps(json.loads(reply), separators=(" , ", " : ")),
)


def play(job: Job, to_the_end: bool) -> None:
    """Two episodes of two constrained calls; between them the agent edits the first reply."""
    with Client(job.url, KEY) as client, openai.OpenAI(base_url=f"{job.url}/v1", api_key="of-the-episode") as ai:
        for number, edit in enumerate(EDITS):
            episode = client.begin_episode()
            assert episode is not None
            _converse(ai.with_options(base_url=episode.base_url, api_key=episode.api_key), episode, edit)
            client.end_episode(episode, float(number))
        if to_the_end:
            assert client.begin_episode() is None


def _converse(ai: openai.OpenAI, episode: Episode, edit: Any) -> None:
    named: Any = {"type": "json_schema", "json_schema": {"name": "word", "schema": WORD}}
    messages: list[Any] = [{"role": "user", "content": "a word"}]
    for _ in range(2):
        answer = ai.chat.completions.create(model=episode.model, messages=messages, response_format=named)
        reply = answer.choices[0].message.content or ""
        assert len(json.loads(reply)["x"]) >= 6
        messages += [{"role": "assistant", "content": edit(reply)}, {"role": "user", "content": "again"}]


def settings_of(**more: Any) -> dict[str, Any]:
    policy = SETTINGS["policies"]["policy"] | {"max_context": 512, "sampling": {"max_tokens": 60}}
    return SETTINGS | {"policies": {"policy": policy}} | more


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(job.checkpoints()[-1] / "model.safetensors")


def untrainable(job: Job) -> list[dict[str, Any]]:
    rows = job.query("SELECT data FROM events WHERE kind = 'episode_untrainable' ORDER BY event_id")
    return [json.loads(row["data"]) for row in rows]


@pytest.mark.slow
def test_replies_that_come_back_cut_and_formatted_in_another_way_are_trained(tmp_path):
    with Job(tmp_path, settings_of()) as job:
        job.start()
        play(job, to_the_end=True)
        job.finish()
        (row,) = job.metrics()
        assert row["train/trained_tokens"] == row["rollout/completion_tokens"]
        assert row["train/episodes_untrainable"] == 0
        assert row["train/rows"] == 4
        assert row["train/logprob_gap_max"] < 0.5  # the engine computes in bf16
        assert untrainable(job) == []


@pytest.mark.slow
def test_an_episode_of_a_manifest_that_can_not_be_trained_is_left_out_the_same_at_every_resume(tmp_path):
    first = tmp_path / "first"
    with Job(first, settings_of()) as job:
        server = job.start(fault="before_step:1")
        play(job, to_the_end=False)
        assert server.wait() == -signal.SIGKILL
        port = job.port
        (odd, fine) = job.manifests()[1]
        with closing(sqlite3.connect(job.run_dir / "run.db")) as store, store:
            changed = store.execute(
                "UPDATE chats SET sampling = json_set(sampling, '$.grammar', ?) WHERE episode_id = ? AND idx = 0",
                ('start: "something else"\n', odd),
            )
            assert changed.rowcount == 1
    whole = []
    for number, fault in enumerate((None, "before_publish:2")):
        folder = tmp_path / f"again-{number}"
        shutil.copytree(first, folder)
        _point_to(folder, first)
        with Job(folder, settings_of(), port=port) as job:
            if fault is not None:
                assert job.serve("--resume", fault=fault).wait() == -signal.SIGKILL
            job.start("--resume")
            job.finish()
            (row,) = job.metrics()
            assert row["train/episodes_untrainable"] == 1
            assert row["train/episodes"] == 2
            assert 0 < row["train/trained_tokens"] < row["rollout/completion_tokens"]
            (*_, said) = untrainable(job)
            assert (said["step"], said["episode_id"]) == (1, odd)
            assert "satisfy the grammar" in said["reason"]
            assert fine not in said["reason"]
            whole.append(weights_of(job))
    one, other = whole
    assert all(torch.equal(one[name], other[name]) for name in one)


def _point_to(folder: Path, before: Path) -> None:
    """A copied run keeps its own configuration's paths."""
    for file in (folder / "run").glob("config.toml"):
        file.write_text(file.read_text().replace(str(before), str(folder)))
