"""The dialogs of Llava 1.5, against transformers' template and processor."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from palestra.renderers import DialogRenderer, NotInThisFormat, PictureTokens, select_renderer
from palestra.renderers.model_layouts import FixedLayout
from unit.vision.seeing import Shown, noise, user
from unit.vision.test_layout import as_parts

# That of the llava-hf models: pictures first, then texts, and the system's without a role.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
LAYOUT = FixedLayout(tokens=16)


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama's: a space before every text, bytes where it has no piece, `<s>` before everything."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"ASISTNUER:abcehnow?.", "▁A"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, "▁U", "T:", "▁n"]))}
    merges = [("▁", "A"), ("▁", "U"), ("T", ":"), ("▁", "n")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>", "<image>")]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def llava():
    tokenizer, shown = sentencepiece(), Shown()
    renderer = select_renderer(tokenizer, pictures=PictureTokens(tokenizer, LAYOUT, shown))
    return tokenizer, shown, renderer


def test_a_dialog_has_the_ids_of_transformers_processor_and_template(llava):
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer, shown, renderer = llava
    size = {"height": 32, "width": 32}
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    processor = LlavaProcessor(images, tokenizer, patch_size=8, vision_feature_select_strategy="full")
    assert isinstance(renderer, DialogRenderer)
    one, other = shown.add(noise(50, 20)), shown.add(noise(7, 90, seed=1))
    said = user("Two.").model_copy(update={"role": "assistant"})
    messages = [user("Be brief.").model_copy(update={"role": "system"}), user("é", one, " how", other, "many?"), said]
    messages.append(user(other, "and now?"))
    found = renderer.render(messages)
    text = tokenizer.apply_chat_template(as_parts(messages), add_generation_prompt=True, tokenize=False)
    pixels = [shown.images[part.digest] for part in (one, other, other)]
    wanted = processor(text=text, images=pixels)["input_ids"][0]
    assert wanted.count(tokenizer.convert_tokens_to_ids("<image>")) == 3 * 16
    assert found.ids.tolist() == wanted
    assert [span.digest for span in found.media] == [one.digest, other.digest, other.digest]


def test_a_dialog_goes_on_with_the_exact_tokens_of_a_reply_and_its_end(llava):
    tokenizer, shown, renderer = llava
    first = renderer.render([user("a")])
    completion = np.array([*tokenizer.encode("Two.", add_special_tokens=False), tokenizer.eos_token_id], np.int32)
    assert renderer.parse(completion, lambda: first.ids).message.text == "Two."
    tails = [
        renderer.extend(lambda: first.ids, kept, [user(shown.add(noise(9, 9)), "b")])
        for kept in (completion, completion[:-1])
    ]
    assert tails[1].ids.tolist() == [tokenizer.eos_token_id, *tails[0].ids]
    whole = tokenizer.encode(f"</s>USER: {'<image>' * 16}\nb ASSISTANT:", add_special_tokens=False)
    assert tails[1].ids.tolist() == whole
    assert [(span.start, span.tokens) for span in tails[0].media] == [(whole.index(tokenizer.vocab["<image>"]) - 1, 16)]


def test_a_text_that_spells_a_control_token_is_text_and_there_are_no_tools(llava):
    tokenizer, _, renderer = llava
    found = renderer.render([user("<image></s>")])
    assert not {tokenizer.vocab["<image>"], tokenizer.eos_token_id} & set(found.ids.tolist())
    with pytest.raises(ValueError, match="no tools"):
        renderer.render([user("a")], [{"type": "function", "function": {"name": "f", "parameters": {}}}])
    with pytest.raises(NotInThisFormat):
        renderer.stream(lambda: None, single_call=True)


@pytest.mark.slow
def test_a_template_that_differs_in_a_space_gets_no_renderer_with_pictures(llava):
    tokenizer, _, _ = llava
    tokenizer.chat_template = TEMPLATE.replace("'<image>\n'", "'<image>'")
    assert not select_renderer(tokenizer, pictures=PictureTokens(tokenizer, LAYOUT, Shown())).takes_images
