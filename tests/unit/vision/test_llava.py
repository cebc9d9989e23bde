"""Llava 1.5: a tower of CLIP, a fixed number of placeholders; a tiny model, made here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palestra.models.attention_backend import TrialAttention
from palestra.models.causal_lm import load_causal_lm
from palestra.renderers import PictureTokens, select_renderer
from unit.engine.calling import serving
from unit.vision.seeing import Shown, noise, user, write_llava


@pytest.fixture(scope="module", params=["default", pytest.param("full", marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("llava")
    return made, write_llava(made, select=request.param)


def test_logits_are_those_of_transformers(folder):
    from transformers import AutoModelForImageTextToText
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    path, tokenizer = folder
    shown = Shown()
    parts = [shown.add(noise(50, 40)), shown.add(noise(20, 70, seed=1))]
    model = load_causal_lm(str(path), torch.float32)
    model.vision.pictures = shown
    renderer = select_renderer(tokenizer, pictures=PictureTokens(tokenizer, model.vision.layout, shown))
    prompt = renderer.render([user("a", parts[0], "b", parts[1])])
    pixels = CLIPImageProcessorPil.from_pretrained(path)(images=list(shown.images.values()), return_tensors="pt")
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    with torch.no_grad():
        wanted = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)(input_ids=ids[None], **pixels)
        rows = model.picture_rows([(picture, picture.positions) for picture in model.vision.placed(*prompt)])
        found = model.logits(model.hidden(ids, torch.arange(len(ids)), TrialAttention(), rows))
        blind = model.logits(model.hidden(ids, torch.arange(len(ids)), TrialAttention()))
    assert (found - wanted.logits[0]).abs().max() < 1e-5
    assert (blind - wanted.logits[0]).abs().max() > 1e-4


async def test_the_engine_scores_a_prompt_with_pictures(folder):
    path, tokenizer = folder
    shown = Shown()
    model = load_causal_lm(str(path), torch.float32)
    model.vision.pictures = shown
    renderer = select_renderer(tokenizer, pictures=PictureTokens(tokenizer, model.vision.layout, shown))
    prompt = renderer.render([user(shown.add(noise(50, 40)), "what")])
    async with serving(model, limits={"PREFILL_CHUNK": 5}) as engine:
        found = await engine.score("policy", prompt)
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    with torch.no_grad():
        rows = model.picture_rows([(picture, picture.positions) for picture in model.vision.placed(*prompt)])
        logits = model.logits(model.hidden(ids, torch.arange(len(ids)), TrialAttention(), rows)).log_softmax(-1)
    wanted = logits[range(len(ids) - 1), ids[1:]].numpy()
    assert np.abs(np.array(found) - wanted).max() < 1e-4
