"""Llava 1.5: a tower of CLIP, a fixed number of placeholders; a tiny model, made here."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from palestra.models.attention_backend import TrialAttention
from palestra.models.byte_model import byte_tokenizer
from palestra.models.causal_lm import load_causal_lm
from palestra.models.vision.tiny import chat_template
from palestra.renderers import PictureTokens, select_renderer
from unit.engine.calling import serving
from unit.vision.seeing import Shown, noise, user


@pytest.fixture(scope="module", params=["default", pytest.param("full", marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    made = tmp_path_factory.mktemp("llava")
    tokenizer = byte_tokenizer(["<image>"])
    tokenizer.chat_template = chat_template("<image>")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=size | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        text_config=size | {"model_type": "llama", "num_key_value_heads": 1, "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy=request.param,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(made)
    tokenizer.save_pretrained(made)
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    }
    (made / "preprocessor_config.json").write_text(json.dumps(images))
    return made, tokenizer


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
    async with serving(model, prefill_chunk=5) as engine:
        found = await engine.score("policy", prompt)
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    with torch.no_grad():
        rows = model.picture_rows([(picture, picture.positions) for picture in model.vision.placed(*prompt)])
        logits = model.logits(model.hidden(ids, torch.arange(len(ids)), TrialAttention(), rows)).log_softmax(-1)
    wanted = logits[range(len(ids) - 1), ids[1:]].numpy()
    assert np.abs(np.array(found) - wanted).max() < 1e-4
