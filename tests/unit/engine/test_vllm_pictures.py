"""Pictures on their way to vLLM: places, names and numbers, decoded by another library than the encoder's."""

from __future__ import annotations

import base64

import msgpack
import numpy as np
import pytest
import torch
from PIL import Image

from palestra.models.catalog import model_folder
from palestra.models.vision.processor import PictureProcessor
from palestra.renderers import PictureTokens
from palestra.types.calls import MediaSpan, TokenSequence
from palestra_engines.vllm.pictures import VllmPictures
from unit.vision.seeing import NAME, Shown, noise, renderer_of, user

QWEN = "tiny-random-qwen-vl"


def decoded(text: str) -> dict[str, torch.Tensor]:
    """The tensors of an item by name, and how each is joined with those of others."""
    found = msgpack.unpackb(base64.b64decode(text), strict_map_key=False)
    read = {}
    for name, part in found.items():
        dtype, shape, (code, raw) = part["data"]
        assert code == 3
        tensor = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)
        kind, settings = part["field"]
        if kind == "flat":
            assert settings == {"slices": [[0, len(tensor), None]], "dim": 0, "keep_on_cpu": False}
        read[name] = tensor
    return read


def prepared(name: str, *images: Image.Image, trained: bool = False, weights: str = "0.0"):
    """The features of a prompt with these pictures, its ids, their digests, and the processor."""
    shown, processor = Shown(), PictureProcessor(model_folder(name))
    parts = [shown.add(image) for image in images]
    prompt = renderer_of(shown, name).render([user("look", *parts, "what is it?")])
    found = VllmPictures(processor, shown, trained=trained).features(prompt, weights)
    return found, prompt.ids, [part.digest for part in parts], processor


def test_each_tile_is_an_item_at_its_placeholders():
    images = [noise(64, 64), noise(30, 20, seed=1)]  # four tiles and the whole, and one of two sizes
    found, ids, digests, processor = prepared(NAME, *images)
    names, places = found["mm_hashes"]["image"], found["mm_placeholders"]["image"]
    items = [decoded(item) for item in found["kwargs_data"]["image"]]
    tiles = [processor.pixels(image)["pixel_values"][0] for image in images]
    wanted = [f"{digest}-{tile}" for digest, own in zip(digests, tiles, strict=True) for tile in range(len(own))]
    assert names == wanted
    assert torch.equal(torch.cat([item["pixel_values"] for item in items]), torch.cat(tiles))
    assert all(item["num_patches"] == 1 and item["pixel_attention_mask"].all() for item in items)
    assert {item["pixel_attention_mask"].dtype for item in items} == {torch.bool}, "a byte a pixel, not eight"
    covered = [place["offset"] + step for place in places for step in range(place["length"])]
    assert covered == np.flatnonzero(ids == processor.image_token).tolist()
    assert {place["length"] for place in places} == {processor.layout.tokens}


def test_a_picture_of_qwen_is_one_item_with_its_grid():
    images = [noise(40, 24), noise(24, 40, seed=1)]
    found, ids, digests, processor = prepared(QWEN, *images)
    assert found["mm_hashes"]["image"] == [f"{digest}-0" for digest in digests]
    for image, text, place in zip(
        images, found["kwargs_data"]["image"], found["mm_placeholders"]["image"], strict=True
    ):
        own, item = processor.pixels(image), decoded(text)
        assert torch.equal(item["pixel_values"], own["pixel_values"])
        assert torch.equal(item["image_grid_thw"], own["image_grid_thw"][0])
        assert place["length"] == int(own["image_grid_thw"].prod()) // 4
        assert (ids[place["offset"] : place["offset"] + place["length"]] == processor.image_token).all()


def test_a_picture_that_follows_itself_and_one_that_was_cut_apart_have_their_own_places():
    shown, processor = Shown(), PictureProcessor(model_folder(NAME))
    part = shown.add(noise(64, 64))
    ids = PictureTokens.ids(renderer_of(shown)._writer._pictures, part.digest)
    twice = np.array([*ids, *ids], np.int32)
    cut = len(ids) // 2
    spans = (
        MediaSpan(0, cut, part.digest),
        MediaSpan(cut, len(ids) - cut, part.digest),
        MediaSpan(len(ids), len(ids), part.digest),
    )
    found = VllmPictures(processor, shown, trained=False).features(TokenSequence(twice, spans), "0.0")
    names, places = found["mm_hashes"]["image"], [place["offset"] for place in found["mm_placeholders"]["image"]]
    assert names[: len(names) // 2] == names[len(names) // 2 :]
    assert [place + len(ids) for place in places[: len(places) // 2]] == places[len(places) // 2 :]
    assert shown.asked == [part.digest], "its pixels are prepared once"


@pytest.mark.parametrize("trained", [False, True])
def test_what_a_tower_computes_is_known_by_another_name_once_the_tower_has_changed(trained):
    image = noise(30, 30)
    before, after = (
        prepared(NAME, image, trained=trained, weights=weights)[0]["mm_hashes"] for weights in ("0.1", "0.2")
    )
    assert (before == after) is not trained


def test_a_tile_of_nothing_but_zeros_is_not_taken_for_padding():
    shown, processor = Shown(), PictureProcessor(model_folder(NAME))
    part = shown.add(Image.new("RGB", (32, 32), (0, 0, 0)))
    prompt = renderer_of(shown).render([user(part)])
    black = processor.pixels(shown.images[part.digest])
    processor.pixels = lambda image: black | {"pixel_values": torch.zeros_like(black["pixel_values"])}
    found = VllmPictures(processor, shown, trained=False).features(prompt, "0.0")
    for item in found["kwargs_data"]["image"]:
        tile = decoded(item)["pixel_values"]
        assert tile.bfloat16().count_nonzero() == 1
        assert 0 < tile.max() < 1.01e-30
