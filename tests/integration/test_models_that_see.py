"""A job whose model sees: pictures in over HTTP, tokens out, gradients, a checkpoint that transformers loads."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from in_process import episode_of, serving, trajectory_of
from PIL import Image

import palestra
from palestra import JobConfig, ModelEndpoint
from palestra.pictures.pixels import encode_picture

POLICY = {"model": "tiny-random-vision", "max_context": 2048, "sampling": {"max_tokens": 4}}
EXACT = {"engine": {"dtype": "float32", "threads": 1}, "trainer": {"dtype": "float32", "threads": 1}}


def picture(seed: int, width: int = 40, height: int = 30) -> dict[str, Any]:
    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = base64.b64encode(encode_picture(Image.fromarray(drawn))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}


async def looks(task: dict[str, Any], endpoint: ModelEndpoint) -> float:
    """Three turns with a picture in each; the first is that of the task, for every episode of its group."""
    messages: list[Any] = []
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for turn in range(3):
            messages.append({"role": "user", "content": [picture(task["n"] + turn), {"type": "text", "text": "?"}]})
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
    return float(len(text))


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_a_job_trains_one_row_an_episode_exactly_and_saves_what_transformers_loads(tmp_path: Path, vision: str) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    settings = {
        "name": "seeing",
        "steps": 2,
        "run_dir": str(tmp_path / "run"),
        "policies": {"policy": POLICY | {"vision": vision, "optimizer": {"learning_rate": 1e-2}}},
        "rollout": {"groups_per_step": 2, "group_size": 3},
        "evaluation": {"every_steps": 0},
        **EXACT,
    }
    tasks = [{"n": n} for n in range(4)]
    result = palestra.train(looks, tasks, JobConfig.model_validate(settings), quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        gaps = [value for name, value in row.items() if "logprob_gap_max" in name]
        assert gaps
        assert max(gaps) < 1e-4
    assert len(list((tmp_path / "run" / "pictures").glob("??/*"))) == 6  # of 36 that were sent
    folder = result.checkpoint
    assert folder is not None
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    start = AutoModelForImageTextToText.from_pretrained(_tiny(), dtype=torch.float32)
    changed = {
        name.split(".")[1]
        for (name, new), (_, old) in zip(model.named_parameters(), start.named_parameters(), strict=True)
        if not torch.equal(new, old)
    }
    assert changed == ({"text_model", "vision_model", "connector"} if vision == "trained" else {"text_model"})
    assert AutoProcessor.from_pretrained(folder, backend="pil").image_seq_len == 4


def _tiny() -> Any:
    from palestra.models.catalog import model_folder

    return model_folder("tiny-random-vision")


@pytest.mark.slow
async def test_what_is_asked_over_http_is_recorded_with_its_pictures_and_their_tokens(tmp_path: Path) -> None:
    settings = {"kind": "training", "policies": {"policy": POLICY}, **EXACT}
    async with serving(tmp_path, **settings) as job, episode_of(job) as (client, episode_id):
        first = {"role": "user", "content": [{"type": "text", "text": "a"}, picture(0)]}
        one = await client.chat.completions.create(model="policy", messages=[first])
        said = {"role": "assistant", "content": one.choices[0].message.content}
        for seed in (1, 2):  # the same conversation goes on with one picture, and with another
            again = {"role": "user", "content": [picture(seed)]}
            await client.chat.completions.create(model="policy", messages=[first, said, again])
        crowd = {"role": "user", "content": [picture(n) for n in range(64)]}
        with pytest.raises(openai.BadRequestError, match=r"2048.*64"):
            await client.chat.completions.create(model="policy", messages=[crowd])
        trajectory = await trajectory_of(job, episode_id)
        begin, left, right = trajectory.chats
        assert left.parent is begin
        assert right.parent is begin
        assert left.all_media[0] == right.all_media[0] == begin.all_media[0]
        assert [len(call.all_media) for call in (begin, left, right)] == [1, 2, 2]
        assert left.all_media[1].digest != right.all_media[1].digest


async def test_a_text_model_refuses_a_picture_by_its_place(tmp_path: Path) -> None:
    settings = {"kind": "training", "policies": {"policy": POLICY | {"model": "tiny-random"}}, **EXACT}
    async with serving(tmp_path, **settings) as job, episode_of(job) as (client, _):
        with pytest.raises(openai.BadRequestError, match="no images"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [picture(0)]}])
