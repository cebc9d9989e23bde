"""Qwen's placeholders: how many a picture has, and where they stand, against transformers' processors."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.config import TINY_QWEN_VL
from palestra.errors import InvalidRequest, ModelError
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_tokenizer
from palestra.models.vision.processor import PictureProcessor
from palestra.models.vision.tiny import chat_template
from palestra.renderers import ChatMLRenderer, PictureTokens, layout_of, select_renderer
from palestra.renderers.model_layouts import PatchLayout
from palestra.renderers.picture_layout import read_layout, write_layout
from palestra.renderers.probes import PLAIN, WITH_TOOLS, as_agents_send
from unit.vision.seeing import Shown, image_processor, noise, renderer_of, seeing_once, user

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([28, 32]),
    st.sampled_from([0, 56 * 56, 65_536]),
    st.sampled_from([28 * 28 * 4, 28 * 28 * 1280, 16_777_216]),
)
def test_the_plane_is_that_to_which_transformers_resizes_a_picture(width, height, side, least, most):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    layout = PatchLayout(side=side, least=least, most=most)
    try:
        high, wide = smart_resize(height, width, factor=side, min_pixels=least, max_pixels=most)
    except ValueError:
        high = wide = 0
    if not high or not wide:
        with pytest.raises(InvalidRequest, match="this model"):
            layout.plane(width, height)
    else:
        assert layout.plane(width, height) == (high // side, wide // side)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_a_picture_has_as_many_placeholders_as_its_patches_merge_into(width, height):
    shown = Shown()
    part = shown.add(noise(width, height))
    layout = seeing_once(TINY_QWEN_VL).vision.layout
    if max(width, height) > 200 * min(width, height):
        return
    tokenizer = load_tokenizer(TINY_QWEN_VL)
    found = PictureTokens(tokenizer, layout, shown).ids(part.digest)
    grid = image_processor(TINY_QWEN_VL)(images=shown.images[part.digest], return_tensors="np")["image_grid_thw"][0]
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|vision_start|>", "<|vision_end|>"))
    assert list(found) == [start, *[seeing_once(TINY_QWEN_VL).vision.image_token] * (grid.prod() // 4), end]
    rows, columns = layout.plane(width, height)
    assert [1, 2 * rows, 2 * columns] == grid.tolist()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([2, 3]))
def test_the_pixels_that_are_shown_as_seen_are_those_of_transformers_processor(width, height, resample):
    """Their patches, four of which are merged, one after another, put together again to a picture."""
    theirs = copy.deepcopy(image_processor(TINY_QWEN_VL))
    theirs.resample = resample
    layout = replace(seeing_once(TINY_QWEN_VL).vision.layout, resample=resample)
    image = noise(width, height)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(InvalidRequest):
            layout.seen(image)
        return
    made = theirs(images=image, return_tensors="np")
    _, high, wide = made["image_grid_thw"][0].tolist()
    merged, side = theirs.merge_size, theirs.patch_size
    patches = made["pixel_values"].reshape(high // merged, wide // merged, merged, merged, 3, -1, side, side)[
        :, :, :, :, :, 0
    ]
    pixels = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(high * side, wide * side, 3)
    wanted = np.rint((pixels * np.array(theirs.image_std) + np.array(theirs.image_mean)) * 255).astype(np.uint8)
    assert np.array_equal(np.asarray(layout.seen(image)), wanted)
    assert layout.seen_size(width, height) == (wide * side, high * side)
    assert layout.cells(width, height) == layout.plane(width, height) == (high // merged, wide // merged)
    assert read_layout(write_layout(layout)) == layout


def test_what_the_model_got_is_said_in_words():
    layout = PatchLayout(side=28, least=3136, most=12_845_056)
    assert layout.in_words(640, 480) == "as 644 × 476 pixels, in 17 × 23 squares of 28 × 28 with an embedding each"


@cache
def qwen_processor():
    """transformers' processor for Qwen2-VL, without the video processor that it can't make without torchvision."""
    from transformers import Qwen2VLProcessor

    class WithoutVideos(Qwen2VLProcessor):
        def check_argument_for_proper_class(self, *_):
            return None

    tokenizer = load_tokenizer(TINY_QWEN_VL)
    return WithoutVideos(image_processor(TINY_QWEN_VL), tokenizer, None, chat_template=tokenizer.chat_template)


def test_a_conversation_has_the_ids_of_transformers_processor_and_template():
    shown = Shown()
    one, other = shown.add(noise(50, 20)), shown.add(noise(64, 90, seed=1))
    found = renderer_of(shown, TINY_QWEN_VL).render([user("Look: ", one, "\n", other, "what is it?"), user(other)])
    asked = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image"},
                {"type": "text", "text": "\n"},
                {"type": "image"},
                {"type": "text", "text": "what is it?"},
            ],
        },
        {"role": "user", "content": [{"type": "image"}]},
    ]
    text = qwen_processor().tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    images = [shown.images[part.digest] for part in (one, other, other)]
    assert found.ids.tolist() == qwen_processor()(text=text, images=images)["input_ids"][0]
    assert [span.digest for span in found.media] == [one.digest, other.digest, other.digest]


@pytest.fixture
def qwen3():
    """A tokenizer with the tags of Qwen3-VL, and the package's renderer for it, which shares nothing with ours."""
    from renderers.qwen3_vl import Qwen3VLRenderer

    class Processor:
        image_processor = image_processor(TINY_QWEN_VL)

    tokenizer = load_tokenizer(TINY_QWEN_VL)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>"])
    return tokenizer, Qwen3VLRenderer(tokenizer, processor=Processor())


@pytest.mark.parametrize("probe", [*PLAIN, *WITH_TOOLS])
def test_texts_and_tools_have_the_ids_of_the_packages_renderer_for_qwen3(qwen3, probe):
    tokenizer, theirs = qwen3
    wanted = theirs.render_ids(list(probe.messages), tools=list(probe.tools) or None, add_generation_prompt=True)
    assert ChatMLRenderer(tokenizer).render(as_agents_send(probe), probe.tools).ids.tolist() == list(wanted)


def test_pictures_have_the_ids_of_the_packages_renderer_for_qwen3(qwen3):
    tokenizer, theirs = qwen3
    shown = Shown()
    parts = [shown.add(noise(50, 20)), shown.add(noise(64, 90, seed=1))]
    said = user("Two.").model_copy(update={"role": "assistant"})
    result = user("It is", parts[0], "!").model_copy(update={"role": "tool", "tool_call_id": "1"})
    messages = [user("Be brief.").model_copy(update={"role": "system"}), user(parts[0], "é?", parts[1]), said]
    messages += [user("and", parts[1], "now?"), said, result]
    given = [{"role": message.role, "content": _their_parts(message, shown)} for message in messages]
    wanted = theirs.render(given, add_generation_prompt=True)
    pictures = PictureTokens(tokenizer, seeing_once(TINY_QWEN_VL).vision.layout, shown)
    found = ChatMLRenderer(tokenizer, pictures=pictures).render(messages)
    assert found.ids.tolist() == list(wanted.token_ids)
    places = [(place.offset, place.length) for place in wanted.multi_modal_data.mm_placeholders["image"]]
    assert places == [(span.start + 1, span.tokens - 2) for span in found.media]  # without what stands around them


def _their_parts(message, shown: Shown):
    if message.role in ("system", "assistant"):
        return message.text
    return [
        {"type": "text", "text": part.text}
        if part.type == "text"
        else {"type": "image", "image": shown.images[part.digest]}
        for part in message.content
    ]


def test_a_text_that_spells_a_placeholder_is_text():
    found = renderer_of(Shown(), TINY_QWEN_VL).render([user(MARKER)])
    assert not found.media
    assert seeing_once(TINY_QWEN_VL).vision.image_token not in found.ids


def test_pictures_that_are_too_narrow_or_too_small_are_refused_with_their_size():
    shown = Shown()
    narrow = shown.add(noise(402, 2))
    with pytest.raises(InvalidRequest, match=r"402.*2 pixels"):
        renderer_of(shown, TINY_QWEN_VL).render([user(narrow)])
    assert PatchLayout(side=28, least=0, most=10**6).plane(15, 15) == (1, 1)
    with pytest.raises(InvalidRequest, match=r"14.*40 pixels.*14"):
        PatchLayout(side=28, least=0, most=10**6).plane(14, 40)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2}, (28, 3136, 12_845_056)),
        ({"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16}, (32, 65_536, 16_777_216)),
        ({}, (28, 3136, 28 * 28 * 1280)),
    ],
    ids=["Qwen2-VL", "Qwen3-VL", "nothing said"],
)
def test_a_layout_has_the_limits_of_the_models_processor(settings, wanted, tmp_path):
    """Those files that the models on the hub have, as transformers reads them."""
    config = {"model_type": "qwen2_vl", "vision_config": {}}
    found = layout_of(config, {"preprocessor_config.json": json.dumps(settings).encode()})
    assert found == PatchLayout(side=wanted[0], least=wanted[1], most=wanted[2])
    inside = json.dumps({"image_processor": settings}).encode()
    assert layout_of(config, {"processor_config.json": inside}) == found
    theirs = PictureProcessor(with_settings(tmp_path, settings))._processor
    assert (theirs.patch_size * theirs.merge_size, theirs.size["shortest_edge"], theirs.size["longest_edge"]) == wanted


def with_settings(folder: Path, settings: dict) -> Path:
    """A model's folder without weights, whose processor has other settings."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(Path(model_folder(TINY_QWEN_VL)) / name, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("settings", [{}, {"max_pixels": 4704}, {"size": {"longest_edge": 3920}}], ids=str)
def test_placeholders_and_patches_agree_whatever_models_were_loaded_before(settings, tmp_path, monkeypatch):
    """In transformers 5.17 the limits of one model become the defaults of all that are loaded after it."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    left = {"shortest_edge": 28 * 28 * 3, "longest_edge": 28 * 28 * 4}
    monkeypatch.setattr(Qwen2VLImageProcessorPil, "size", left)
    processor = PictureProcessor(with_settings(tmp_path, settings))
    for width, height in ((20, 30), (200, 100)):
        rows, columns = processor.layout.plane(width, height)
        assert processor.pixels(noise(width, height))["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    assert left["longest_edge"] == 28 * 28 * 4


def test_a_screenshot_has_as_many_placeholders_as_the_page_says():
    planes = [PatchLayout(side=28, least=3136, most=most).plane(1920, 1080) for most in (12_845_056, 1_003_520)]
    assert [rows * columns for rows, columns in planes] == [2691, 1222]


def test_pictures_that_are_not_resized_are_not_supported():
    files = {"preprocessor_config.json": b'{"do_resize": false}'}
    with pytest.raises(ModelError, match="do_resize"):
        layout_of({"model_type": "qwen2_vl", "vision_config": {}}, files)


def test_a_model_takes_pictures_only_if_its_template_shows_them_where_they_stand():
    tokenizer, layout = load_tokenizer(TINY_QWEN_VL), seeing_once(TINY_QWEN_VL).vision.layout
    pictures = PictureTokens(tokenizer, layout, Shown())
    found = select_renderer(tokenizer, pictures=pictures)
    assert isinstance(found, ChatMLRenderer)
    assert found.takes_images
    tokenizer.chat_template = chat_template("<|image_pad|>")  # without what stands around it
    assert not select_renderer(tokenizer, pictures=pictures).takes_images


def test_a_default_system_message_is_that_of_the_template():
    tokenizer, layout = load_tokenizer(TINY_QWEN_VL), seeing_once(TINY_QWEN_VL).vision.layout
    first = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    tokenizer.chat_template = first + chat_template(MARKER)
    shown = Shown()
    part = shown.add(noise(20, 20))
    renderer = select_renderer(tokenizer, pictures=PictureTokens(tokenizer, layout, shown))
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    wanted = text.replace(MARKER, layout.text(20, 20))
    assert renderer.render([user(part, "?")]).ids.tolist() == tokenizer.encode(wanted, add_special_tokens=False)
