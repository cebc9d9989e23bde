from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import ModelError
from palestra.renderers import ChatMLRenderer, DialogRenderer, NotInThisFormat, PictureTokens, select_renderer
from palestra.renderers.model_layouts import FixedLayout
from palestra.renderers.picture_layout import TiledLayout, layout_of, read_layout, write_layout
from unit.vision.seeing import Shown, noise, processor, renderer_of, seeing_once, user


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_placeholders_are_those_of_transformers_processor(width, height):
    shown = Shown()
    part = shown.add(noise(width, height))
    found = PictureTokens(processor().tokenizer, seeing_once().vision.layout, shown).ids(part.digest)
    wanted = processor()(text="<image>", images=[shown.images[part.digest]])["input_ids"][0]
    assert list(found) == wanted


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([364, 512]), st.integers(1, 5), st.booleans())
def test_the_grid_is_that_into_which_transformers_cuts_a_picture_of_this_size(width, height, tile, times, small):
    """Compared by sizes alone, as transformers' own prediction of them does for servers, and with its two steps."""
    from transformers.models.idefics3 import image_processing_pil_idefics3 as theirs

    longest = tile * times if not small else tile // 2
    high, wide = theirs._resize_output_size_rescale_to_max_len(height, width, max_len=longest)
    high, wide = theirs._resize_output_size_scale_below_upper_bound(high, wide, max_len=theirs.MAX_IMAGE_SIZE)
    made = []

    class Recorded(theirs.Idefics3ImageProcessorPil):
        def resize(self, image, size, **_):
            made.append((size.height, size.width))

    class Sized:
        shape = (3, high, wide)

    Recorded().resize_for_vision_encoder(Sized(), tile)
    (resized,) = made
    cut = resized[0] > tile or resized[1] > tile
    wanted = (resized[0] // tile, resized[1] // tile) if cut else (0, 0)
    assert TiledLayout(tokens=4, tile=tile, longest=longest, splits=True).grid(width, height) == wanted


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_the_pixels_that_are_shown_as_seen_are_those_of_transformers_processor(width, height, splits):
    theirs = copy.deepcopy(processor().image_processor)
    theirs.do_image_splitting = splits
    image = noise(width, height)
    (tiles,) = theirs(images=[[image]], return_tensors="np")["pixel_values"]
    wanted = np.rint((tiles * 0.5 + 0.5) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    layout = replace(seeing_once().vision.layout, splits=splits)
    seen = np.asarray(layout.seen(image))
    rows, columns = layout.grid(width, height)
    side = layout.tile
    found = [
        seen[row * side : row * side + side, column * side : column * side + side]
        for row in range(max(rows, 1))
        for column in range(max(columns, 1))
    ]
    assert len(tiles) == len(found) + (rows > 0)  # the last is the whole
    assert np.array_equal(np.stack(found), wanted[: len(found)])


@pytest.mark.parametrize("longest", [64, None])
def test_what_a_run_notes_of_tiles_is_read_back_also_where_it_was_noted_without_its_kind(longest):
    layout = TiledLayout(tokens=4, tile=32, longest=longest, splits=True)
    assert read_layout(write_layout(layout)) == layout
    assert read_layout(json.dumps(asdict(layout))) == layout  # as runs of before have it
    assert write_layout(None) is None
    rows = layout.cells(90, 60)[0]
    assert layout.in_words(90, 60) == f"as {rows} × {2 if longest else 3} tiles of 32 × 32 pixels, and the whole in one"


def test_a_conversation_has_the_ids_of_transformers_processor_and_template():
    shown = Shown()
    one, other = shown.add(noise(50, 20)), shown.add(noise(7, 90, seed=1))
    messages = [user("Look: ", one, "\n", other, "what is it?"), user(other)]
    found = renderer_of(shown).render(messages)
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
    text = processor().apply_chat_template(asked, add_generation_prompt=True)
    images = [shown.images[part.digest] for part in (one, other, other)]
    assert found.ids.tolist() == processor()(text=text, images=images)["input_ids"][0]
    assert [span.digest for span in found.media] == [one.digest, other.digest, other.digest]
    around = processor().tokenizer.convert_tokens_to_ids("<fake_token_around_image>")
    for span in found.media:
        assert found.ids[span.start] == found.ids[span.start + span.tokens - 1] == around


def test_what_follows_a_reply_has_its_pictures_by_their_place_in_it():
    shown = Shown()
    part = shown.add(noise(40, 40))
    renderer = renderer_of(shown)
    whole = renderer.render([user("a"), user("b", part)])
    first = renderer.render([user("a")])
    tail = renderer.extend(lambda: first.ids, first.ids[:0], [user("b", part)])
    (span,), (placed,) = tail.media, whole.media
    assert tail.ids[span.start : span.start + span.tokens].tolist() == list(
        whole.ids[placed.start : placed.start + placed.tokens]
    )


def test_a_text_that_spells_a_placeholder_is_text():
    shown = Shown()
    found = renderer_of(shown).render([user("<image><fake_token_around_image>")])
    assert not found.media
    assert seeing_once().vision.image_token not in found.ids


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_pictures_that_the_format_can_not_show_are_refused(role):
    shown = Shown()
    part = shown.add(noise(8, 8))
    said = user(part).model_copy(update={"role": role})
    with pytest.raises(ValueError, match=rf"{role}.*picture"):
        renderer_of(shown).render([said, user("a")])


def test_a_result_of_a_tool_may_have_a_picture():
    shown = Shown()
    part = shown.add(noise(8, 8))
    result = user("a", part).model_copy(update={"role": "tool", "tool_call_id": "1"})
    found = renderer_of(shown).render([user("b"), result, result])
    text = processor().tokenizer.decode(found.ids)
    before, after = "<tool_response>\na<fake", "around_image>\n</tool_response>"
    assert text.count(before) == text.count(after) == len(found.media) == 2


def test_llava_has_a_fixed_number_of_placeholders():
    config = {"model_type": "llava", "vision_config": {"patch_size": 14}}
    images = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, "resample": 3}
    found = layout_of(config, {"preprocessor_config.json": json.dumps(images).encode()})
    assert found == FixedLayout(tokens=576, side=336, shorter=336)
    assert found.cells(640, 480) == (24, 24)
    squares = "in 24 × 24 squares of 14 × 14 with an embedding each"
    assert found.in_words(640, 480) == f"as 336 × 336 pixels in the middle of 448 × 336, {squares}"
    assert found.in_words(100, 100) == f"as 336 × 336 pixels, {squares}"


LLAVA = {
    "as Llava 1.5": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "numbers": {"size": 40, "crop_size": 32},
    "stretched": {"size": {"height": 32, "width": 32}, "crop_size": 32, "resample": 2},
    "stretched, and then cut": {"size": {"height": 40, "width": 36}, "crop_size": 32},
    "with edges that are black": {"size": {"shortest_edge": 16}, "crop_size": 32},
    "as it is": {"do_resize": False, "crop_size": 32},
    "of no whole patches": {"size": {"shortest_edge": 37}, "crop_size": 37},
}


@pytest.mark.parametrize("images", LLAVA.values(), ids=LLAVA)
@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(1, 200))
def test_the_pixels_that_are_shown_as_seen_by_llava_are_those_of_transformers_processor(images, width, height):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    theirs = CLIPImageProcessorPil(**images)
    config = {"model_type": "llava", "vision_config": {"patch_size": 8}}
    layout = layout_of(config, {"preprocessor_config.json": json.dumps(images).encode()})
    image = noise(width, height)
    (pixels,) = theirs(images=[image], return_tensors="np")["pixel_values"]
    mean, std = np.array(theirs.image_mean)[:, None, None], np.array(theirs.image_std)[:, None, None]
    wanted = np.rint((pixels * std + mean) * 255).astype(np.uint8).transpose(1, 2, 0)
    used = wanted.shape[0] // 8 * 8  # a convolution over whole patches leaves out the rest
    assert np.array_equal(np.asarray(layout.seen(image)), wanted[:used, :used])
    assert (
        layout.seen_size(width, height) == (used, used) == tuple(8 * number for number in layout.cells(width, height))
    )
    assert layout.tokens == layout.cells(width, height)[0] ** 2
    assert read_layout(write_layout(layout)) == layout


@pytest.mark.parametrize("images", [{"size": {"longest_edge": 9}}, {"do_center_crop": False}])
def test_pictures_of_llava_that_are_not_cut_to_a_square_of_known_size_are_not_supported(images):
    config = {"model_type": "llava", "vision_config": {}}
    with pytest.raises(ModelError, match=r"Llava.*made"):
        layout_of(config, {"preprocessor_config.json": json.dumps(images).encode()})


# That of SmolVLM-Instruct and, with another first token, of Idefics3-8B-Llama3.
DIALOG = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@pytest.fixture
def dialog():
    """A tokenizer with the template of SmolVLM, pictures, and the renderer that is chosen for it."""
    tokenizer = copy.deepcopy(processor().tokenizer)
    tokenizer.chat_template = DIALOG
    shown = Shown()
    renderer = select_renderer(tokenizer, pictures=PictureTokens(tokenizer, seeing_once().vision.layout, shown))
    return tokenizer, shown, renderer


def as_parts(messages):
    return [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text} if part.type == "text" else {"type": "image"}
                for part in message.content
            ],
        }
        for message in messages
    ]


def test_a_dialog_has_the_ids_of_transformers_processor_and_template(dialog):
    tokenizer, shown, renderer = dialog
    one, other = shown.add(noise(50, 20)), shown.add(noise(7, 90, seed=1))
    assert isinstance(renderer, DialogRenderer)
    said = user("Two.").model_copy(update={"role": "assistant"})
    messages = [user("Be brief.").model_copy(update={"role": "system"}), user(one, other, "how many?"), said]
    messages.append(user("Look: ", other, "again"))
    found = renderer.render(messages)
    text = tokenizer.apply_chat_template(as_parts(messages), add_generation_prompt=True, tokenize=False)
    images = [shown.images[part.digest] for part in (one, other, other)]
    assert found.ids.tolist() == processor()(text=text, images=images)["input_ids"][0]
    assert [span.digest for span in found.media] == [one.digest, other.digest, other.digest]


def test_a_dialog_goes_on_with_the_exact_tokens_of_a_reply(dialog):
    tokenizer, shown, renderer = dialog
    part = shown.add(noise(50, 20))
    first = renderer.render([user("a")])
    completion = np.array(tokenizer.encode(" Two.<end_of_utterance>", add_special_tokens=False), np.int32)
    reply = renderer.parse(completion, lambda: first.ids).message
    assert reply.text == "Two."
    assert renderer.parse(completion[:-1], lambda: first.ids).message == reply  # cut at its limit
    whole = renderer.render([user("a"), reply, user(part)])
    for kept in (completion, completion[:-1]):
        tail = renderer.extend(lambda: first.ids, kept, [user(part)])
        assert [*first.ids, *kept, *tail.ids] == whole.ids.tolist()
        (span,), (placed,) = tail.media, whole.media
        assert span.start + len(first.ids) + len(kept) == placed.start
    stream = renderer.stream(lambda: first.ids)
    stream.feed(" Two.")
    assert stream.finish(completion, cut=False)[1].message == reply


def test_a_dialog_has_no_tools(dialog):
    _, _, renderer = dialog
    with pytest.raises(ValueError, match="no tools"):
        renderer.render([user("a")], [{"type": "function", "function": {"name": "f", "parameters": {}}}])
    with pytest.raises(ValueError, match="no tools"):
        renderer.render([user("a"), user("b").model_copy(update={"role": "tool", "tool_call_id": "1"})])
    with pytest.raises(NotInThisFormat):
        renderer.stream(lambda: None, single_call=True)


def test_a_model_of_chatml_with_pictures_gets_chatml():
    shown = Shown()
    pictures = PictureTokens(processor().tokenizer, seeing_once().vision.layout, shown)
    assert isinstance(select_renderer(processor().tokenizer, pictures=pictures), ChatMLRenderer)
    assert select_renderer(processor().tokenizer, pictures=pictures).takes_images
    assert not select_renderer(processor().tokenizer).takes_images
