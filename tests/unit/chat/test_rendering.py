from __future__ import annotations

import numpy as np
import pytest

from palestra.chat import ChatMLRenderer, render_prompt, reply_message, select_renderer
from palestra.schemas.messages import text_message
from unit.building import ids

HELLO = text_message("user", "hello")
BACK = text_message("assistant", "hi")
MORE = text_message("user", "more")


def test_tiny_random_gets_our_renderer_without_a_default_system_message(tiny_renderer):
    assert isinstance(tiny_renderer, ChatMLRenderer)
    assert tiny_renderer.config.default_system is None


@pytest.mark.model
def test_smollm2_gets_our_renderer_with_its_default_system_message(smollm_renderer):
    assert isinstance(smollm_renderer, ChatMLRenderer)
    assert smollm_renderer.config.default_system.startswith("You are a helpful AI assistant named SmolLM")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: ",
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ],
)
def test_a_template_that_is_not_exactly_chatml_is_left_to_itself(template):
    from palestra.models.causal_lm import load_tokenizer

    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = template
    renderer = select_renderer(tokenizer)
    assert not isinstance(renderer, ChatMLRenderer)
    messages = [{"role": "user", "content": " hello "}]
    assert renderer.render_ids(messages, add_generation_prompt=True) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    prompt, shared = render_prompt(renderer, (HELLO, BACK, MORE), (ids(1, 2), ids(3)), 2)
    assert shared == 0
    assert prompt.tolist() == renderer.render_ids(
        [{"role": m.role, "content": m.text} for m in (HELLO, BACK, MORE)], add_generation_prompt=True
    )


def test_a_first_call_is_rendered_whole(byte_renderer):
    prompt, shared = render_prompt(byte_renderer, (HELLO,), None, 0)
    assert shared == 0
    assert prompt.dtype == np.int32
    assert bytes(prompt[1:11].tolist()) == b"user\nhello"


def test_an_extending_call_starts_with_the_exact_ids_and_says_how_many(byte_renderer):
    before, _ = render_prompt(byte_renderer, (HELLO,), None, 0)
    odd = ids(ord("h"), ord("i"), 258)
    prompt, shared = render_prompt(byte_renderer, (HELLO, BACK, MORE), (before, odd), 2)
    assert shared == len(before) + 3
    assert prompt[:shared].tolist() == [*before.tolist(), *odd.tolist()]


def test_sampled_ids_win_over_their_text(byte_renderer):
    """The reply is said to be "hi", its ids are others: the ids stand."""
    before, _ = render_prompt(byte_renderer, (HELLO,), None, 0)
    prompt, shared = render_prompt(byte_renderer, (HELLO, BACK, MORE), (before, ids(0xC3, 258)), 2)
    assert prompt[len(before) : shared].tolist() == [0xC3, 258]


def test_where_there_is_no_bridge_all_is_rendered_afresh_and_nothing_is_shared(byte_renderer):
    before, _ = render_prompt(byte_renderer, (HELLO,), None, 0)
    conversation = (HELLO, BACK, BACK, MORE)
    prompt, shared = render_prompt(byte_renderer, conversation, (before, ids(1, 258)), 2)
    assert shared == 0
    assert prompt.tolist() == render_prompt(byte_renderer, conversation, None, 0)[0].tolist()


def test_what_is_said_to_be_shared_is_always_what_the_prompt_starts_with(byte_renderer):
    before, _ = render_prompt(byte_renderer, (HELLO,), None, 0)
    for completion in (ids(1), ids(258), ids(1, 258, 2), ids(256, 1), ids(258, 258)):
        prompt, shared = render_prompt(byte_renderer, (HELLO, BACK, MORE), (before, completion), 2)
        history = np.concatenate((before, completion))
        assert shared in (0, len(history))
        assert prompt[:shared].tolist() == history[:shared].tolist()


def test_a_reply_is_an_assistants_message(byte_renderer):
    assert reply_message(byte_renderer, ids(*b"ok", 258), ids(1)) == text_message("assistant", "ok")
