from __future__ import annotations

import numpy as np
import pytest
import torch

from palestra.errors import ConfigError, ModelError
from palestra.models.attention_backend import TrialAttention
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.models.loading import LoadedModels
from palestra.models.vision.vision import KeptEmbeddings, KeptPixels, placed_pictures
from palestra.types.calls import MediaSpan
from unit.vision.seeing import (
    NAME,
    Shown,
    noise,
    own_logits,
    pil_processor,
    processor,
    renderer_of,
    seeing,
    transformers_model,
    user,
)

CPU = torch.device("cpu")


def flat_logits(model, prompt) -> torch.Tensor:
    placed = [(picture, picture.positions) for picture in model.vision.placed(*prompt)]
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    rows = model.picture_rows(placed)
    return model.logits(model.hidden(ids, torch.arange(len(ids)), TrialAttention(), rows))


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [[(40, 40)], [(300, 20), (20, 300)], [(1, 1), (33, 64), (1, 1)]])
def test_logits_are_those_of_transformers(sizes):
    shown = Shown()
    parts = [shown.add(noise(*size, seed=sum(size))) for size in sizes]
    prompt = renderer_of(shown).render([user("look", *parts, "at this")])
    wanted = own_logits(transformers_model(), prompt.ids, [shown.images[part.digest] for part in parts])
    found = flat_logits(seeing(shown), prompt)
    assert (found - wanted).abs().max() < 1e-5
    other = flat_logits(seeing(shown), prompt._replace(media=()))
    assert (other - wanted).abs().max() > 1e-3  # the pictures are what makes them equal


@torch.inference_mode()
def test_pixels_are_those_of_transformers_processor_for_several_pictures_together():
    shown = Shown()
    images = [noise(64, 64), noise(64, 64, seed=1)]
    together = processor().image_processor(images=[images], return_tensors="pt")["pixel_values"][0]
    vision = seeing(shown).vision
    assert torch.equal(torch.cat([vision.processor.pixels(image)["pixel_values"][0] for image in images]), together)


@torch.inference_mode()
def test_a_tile_of_zeros_is_not_dropped():
    """transformers takes it as padding, which a model whose pixels have mean 0.5 meets only between black and white."""
    vision = seeing(Shown()).vision
    pixels = {name: torch.zeros_like(tensor) for name, tensor in vision.processor.pixels(noise(8, 8)).items()}
    pixels["pixel_attention_mask"] += 1
    assert len(vision.tower(pixels)) == len(vision.tower(vision.processor.pixels(noise(8, 8))))


def test_embeddings_are_kept_until_the_tower_changes():
    shown = Shown()
    digest = shown.add(noise(8, 8)).digest
    model = seeing(shown, trained=True)
    with torch.no_grad():
        first = model.vision.embeddings(digest)
        assert model.vision.embeddings(digest) is first
        assert shown.asked == [digest]
        model.take_weights({name: weight + 0.1 for name, weight in model.own_weights()})
        assert not torch.equal(model.vision.embeddings(digest), first)
        assert model.copied().vision.kept is not model.vision.kept
        assert model.copied().vision.pictures is shown
    frozen = seeing(shown)
    with torch.no_grad():
        first = frozen.vision.embeddings(digest)
        frozen.take_weights({name: weight + 0.1 for name, weight in frozen.own_weights()})
        assert frozen.vision.embeddings(digest) is first


def embedded(vision, image):
    """What the tower makes of a picture that is read anew."""
    return vision.tower(vision.processor.pixels(image))


def test_a_picture_is_decoded_and_resized_once_for_a_tower_that_changes():
    shown = Shown()
    digest = shown.add(noise(8, 8)).digest
    trained = seeing(shown, trained=True)
    trained.vision.kept = None  # as in a trainer
    with torch.no_grad():
        first = trained.vision.embeddings(digest)
        assert torch.equal(trained.vision.embeddings(digest), first)
        assert shown.asked == [digest]
        assert torch.equal(embedded(trained.vision, shown.images[digest]), first)
        assert trained.vision.computed == 2
        trained.take_weights({name: weight + 0.1 for name, weight in trained.own_weights()})
        changed = trained.vision.embeddings(digest)
        assert not torch.equal(changed, first)
        assert torch.equal(changed, embedded(trained.vision, shown.images[digest]))
        assert shown.asked == [digest]
        assert torch.equal(trained.copied().vision.embeddings(digest), changed)
        assert shown.asked == [digest] * 2  # a copy computes in another thread, and keeps its own


def test_no_more_pixels_are_kept_than_their_bytes_allow():
    kept = KeptPixels(most_bytes=100)
    kept.put("a", {"pixel_values": torch.zeros(10), "pixel_attention_mask": torch.zeros(5)})
    kept.put("b", {"pixel_values": torch.zeros(10)})
    assert kept.get("a") is not None
    kept.put("c", {"pixel_values": torch.zeros(1)})
    assert kept.get("b") is None
    assert len(kept) == 2


def test_no_more_embeddings_are_kept_than_their_bytes_allow():
    kept = KeptEmbeddings(most_bytes=100)
    for name in "abc":
        kept.put(name, torch.zeros(10))
    assert kept.get("a") is None
    assert len(kept) == 2
    kept.get("b")
    kept.put("d", torch.zeros(10))
    assert kept.get("c") is None
    kept.put("large", torch.zeros(26))
    assert kept.get("large") is None
    assert len(kept) == 2
    kept.clear()
    kept.put("e", torch.zeros(25))
    assert len(kept) == 1


def test_what_changes_is_all_but_the_tower_unless_it_is_trained():
    shown = Shown()
    frozen, trained = seeing(shown), seeing(shown, trained=True)
    left = {name for name, _ in trained.own_parameters()} - {name for name, _ in frozen.own_parameters()}
    assert {name.split(".")[1] for name in left} == {"vision_model", "connector"}
    assert len(trained.own_parameters()) == len(trained.named_parameters())
    body = {f"model.{name}" for name, _ in frozen.body_parameters()}
    assert body == {name for name, _ in frozen.own_parameters()}


def test_what_is_saved_is_loaded_by_transformers_and_by_us(tmp_path):
    shown = Shown()
    part = shown.add(noise(50, 30))
    model = seeing(shown, trained=True)
    with torch.no_grad():
        for _, weight in model.own_parameters():
            weight += 0.01
    model.save(tmp_path, load_tokenizer(NAME))
    prompt = renderer_of(shown).render([user(part)])
    again = load_causal_lm(str(tmp_path), torch.float32)
    again.vision.pictures = shown
    with torch.inference_mode():
        wanted = flat_logits(model, prompt)
        found = pil_processor(tmp_path)(
            text=processor().apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}]}], add_generation_prompt=True
            ),
            images=[shown.images[part.digest]],
            return_tensors="pt",
        )
        assert found["input_ids"][0].tolist() == prompt.ids.tolist()
        assert (transformers_model(tmp_path)(**found).logits[0] - wanted).abs().max() < 1e-5
        assert torch.equal(flat_logits(again, prompt), wanted)
    assert {"vision_model", "connector"} <= {name.split(".")[1] for name in model.read(tmp_path) if "model." in name}


def test_placeholders_stand_for_pictures_only_in_spans_and_parts_of_a_span_are_joined():
    ids = np.array([7, 1, 7, 7, 2, 7, 7, 7], np.int32)
    spans = (MediaSpan(1, 2, "a"), MediaSpan(3, 1, "a"), MediaSpan(5, 2, "b"))
    found = placed_pictures(ids, spans, image_token=7)
    assert [(digest, at.tolist()) for digest, at in found] == [("a", [2, 3]), ("b", [5, 6])]


@torch.inference_mode()
def test_a_picture_that_follows_itself_is_shown_twice():
    shown = Shown()
    part = shown.add(noise(20, 20))
    prompt = renderer_of(shown).render([user(part, part)])
    first, second = prompt.media
    joined = (MediaSpan(first.start, first.tokens + second.tokens, part.digest),)
    model = seeing(shown)
    assert torch.equal(flat_logits(model, prompt), flat_logits(model, prompt._replace(media=joined)))
    assert model.vision.computed == 1


def test_another_number_of_placeholders_than_embeddings_is_refused():
    shown = Shown()
    part = shown.add(noise(20, 20))
    prompt = renderer_of(shown).render([user(part)])
    (span,) = prompt.media
    with pytest.raises(ModelError, match=r"embeddings.*placeholders"):
        flat_logits(seeing(shown), prompt._replace(media=(span._replace(tokens=span.tokens - 4),)))


def test_models_that_see_take_no_adapter_and_text_models_no_tower():
    from palestra.config import AdapterConfig

    models = LoadedModels()
    with pytest.raises(ConfigError, match=r"adapters.*see"):
        models.adapted(NAME, AdapterConfig(), 0, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"'trained'.*text"):
        models.own("tiny-random", torch.float32, CPU, "trained")
    with pytest.raises(ModelError, match=r"given.*pictures"):
        models.own(NAME, torch.float32, CPU)[0].vision.embeddings("a" * 64)


def test_families_that_are_not_supported_are_refused_by_name(tmp_path):
    from transformers import PaliGemmaConfig

    PaliGemmaConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"see.*idefics3"):
        load_causal_lm(str(tmp_path), torch.float32)
