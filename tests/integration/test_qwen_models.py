"""Jobs with a model of Qwen's family: trained, continued over HTTP, and asked with pictures that it can't take."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
import torch
from in_process import episode_of, serving, trajectory_of
from test_models_that_see import EXACT, looks, picture

import palestra
from palestra import JobConfig

POLICY = {"model": "tiny-random-qwen-vl", "max_context": 512, "sampling": {"max_tokens": 4}}


@pytest.mark.slow
def test_a_job_trains_one_row_an_episode_exactly_and_saves_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    settings = {
        "name": "seeing",
        "steps": 2,
        "run_dir": str(tmp_path / "run"),
        "policies": {"policy": POLICY | {"vision": "trained", "optimizer": {"learning_rate": 1e-2}}},
        "rollout": {"groups_per_step": 2, "group_size": 3},
        "evaluation": {"every_steps": 0},
        **EXACT,
    }
    result = palestra.train(looks, [{"n": n} for n in range(4)], JobConfig.model_validate(settings), quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        gaps = [value for name, value in row.items() if "logprob_gap_max" in name]
        assert gaps
        assert max(gaps) < 1e-4
    assert result.checkpoint is not None
    model = AutoModelForImageTextToText.from_pretrained(result.checkpoint, dtype=torch.float32)
    assert model.config.model_type == "qwen2_vl"
    assert "<|image_pad|>" in AutoTokenizer.from_pretrained(result.checkpoint).chat_template
    assert json.loads((Path(result.checkpoint) / "preprocessor_config.json").read_text())["merge_size"] == 2


@pytest.mark.slow
async def test_a_conversation_goes_on_behind_its_picture_and_bad_pictures_are_refused_by_name(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, kind="training", policies={"policy": POLICY}, **EXACT) as job,
        episode_of(job) as (client, episode_id),
    ):

        async def ask(*messages):
            return await client.chat.completions.create(model="policy", messages=list(messages))

        first = {"role": "user", "content": [{"type": "text", "text": "a"}, picture(0, 64, 64)]}
        one = await ask(first)
        said = {"role": "assistant", "content": one.choices[0].message.content}
        await ask(first, said, {"role": "user", "content": [picture(1, 20, 60), {"type": "text", "text": "b"}]})
        narrow = {"role": "user", "content": [picture(0), picture(2, 402, 2)]}
        with pytest.raises(openai.UnprocessableEntityError, match=r"messages\.0\.content\.1.*402.*2"):
            await ask(narrow)
        crowd = {"role": "user", "content": [picture(n, 64, 64) for n in range(40)]}
        with pytest.raises(openai.BadRequestError, match=r"512.*40.*720"):
            await ask(crowd)
        trajectory = await trajectory_of(job, episode_id)
        begin, second = trajectory.chats
        assert second.parent is begin
        assert [len(call.all_media) for call in (begin, second)] == [1, 2]
