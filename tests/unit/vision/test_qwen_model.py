"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers: pixels, logits, and what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from palestra.config import TINY_QWEN_VL
from palestra.models.attention_backend import TrialAttention
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from unit.vision.seeing import Shown, image_processor, noise, own_logits, renderer_of, seeing, transformers_model, user

pytestmark = pytest.mark.ci


def flat_logits(model, prompt) -> torch.Tensor:
    rows = model.picture_rows([(picture, picture.positions) for picture in model.vision.placed(*prompt)])
    ids = torch.from_numpy(prompt.ids).long()
    return model.logits(model.hidden(ids, model.positions(prompt), TrialAttention(), rows))


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [[(40, 40)], [(300, 20), (20, 300)], [(1, 1), (33, 64), (3, 1), (1, 1)]])
def test_logits_are_those_of_transformers(qwen, sizes):
    shown = Shown()
    parts = [shown.add(noise(*size, seed=sum(size))) for size in sizes]
    prompt = renderer_of(shown, qwen).render([user("look", *parts, "at this")])
    wanted = own_logits(
        transformers_model(model_folder(qwen)), prompt.ids, [shown.images[part.digest] for part in parts], qwen
    )
    model = seeing(shown, name=qwen)
    assert (flat_logits(model, prompt) - wanted).abs().max() < 1e-5
    assert (flat_logits(model, prompt._replace(media=())) - wanted).abs().max() > 1e-3  # the pictures make them equal


@torch.inference_mode()
def test_positions_in_the_plane_are_needed(qwen):
    shown = Shown()
    model = seeing(shown, name=qwen)
    prompt = renderer_of(shown, qwen).render([user("look", shown.add(noise(60, 60)), "at this")])
    rows = model.picture_rows([(picture, picture.positions) for picture in model.vision.placed(*prompt)])
    ids = torch.from_numpy(prompt.ids).long()
    as_text = model.logits(model.hidden(ids, torch.arange(len(ids)), TrialAttention(), rows))
    assert (flat_logits(model, prompt) - as_text).abs().max() > 1e-3


@torch.inference_mode()
def test_pixels_are_those_of_transformers_processor_for_several_pictures_together():
    images = [noise(64, 64), noise(90, 33, seed=1)]
    together = image_processor(TINY_QWEN_VL)(images=images, return_tensors="pt")
    vision = seeing(Shown(), name=TINY_QWEN_VL).vision
    alone = [vision.processor.pixels(image) for image in images]
    for name, wanted in together.items():
        assert torch.equal(torch.cat([pixels[name] for pixels in alone]), wanted)


@torch.inference_mode()
def test_embeddings_of_a_picture_have_what_later_layers_add(tmp_path):
    from palestra.models.vision.tiny import make_tiny_qwen

    make_tiny_qwen(tmp_path, "qwen3_vl")
    model = seeing(Shown(), name=str(tmp_path))
    assert model.vision.tower(model.vision.processor.pixels(noise(64, 32))).shape == (8, 3 * 64)


def test_what_is_saved_is_loaded_by_transformers_and_by_us(qwen, tmp_path):
    shown = Shown()
    part = shown.add(noise(50, 30))
    model = seeing(shown, trained=True, name=qwen)
    with torch.no_grad():
        for _, weight in model.own_parameters():
            weight += 0.01
    model.save(tmp_path, load_tokenizer(qwen))
    prompt = renderer_of(shown, qwen).render([user(part)])
    again = load_causal_lm(str(tmp_path), torch.float32)
    again.vision.pictures = shown
    with torch.inference_mode():
        wanted = flat_logits(model, prompt)
        assert torch.equal(flat_logits(again, prompt), wanted)
        theirs = own_logits(transformers_model(tmp_path), prompt.ids, [shown.images[part.digest]], qwen)
    assert (theirs - wanted).abs().max() < 1e-5


def test_layers_are_those_of_the_text_model_alone(qwen):
    """Qwen2-VL's tower has as many layers here, and comes first."""
    model = seeing(Shown(), name=qwen)
    text = model.vision.tower.text
    assert model.blocks == list(text.layers)
    assert all(isinstance(block, nn.Module) for block in model.blocks)
    owned = {name.split(".")[1] for name, _ in model.named_parameters() if model.vision.owns(name)}
    assert owned == {"visual"}
