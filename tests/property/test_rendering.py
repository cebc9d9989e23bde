"""Our ChatML against the models' own templates, and what a bridge promises."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from palestra.chat import render_prompt, reply_message, select_renderer
from palestra.models.causal_lm import load_tokenizer
from palestra.schemas.messages import text_message

MODELS = ["tiny-random", pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.model)]
each_model = pytest.mark.parametrize("model", MODELS)


@cache
def both(model: str):
    tokenizer = load_tokenizer(model)
    return tokenizer, select_renderer(tokenizer)


# Letters that tokenizers treat in ways of their own, and anything else that can be encoded.
odd = st.sampled_from(
    [" ", "\n", "\t", "\r", "  ", "\u00a0", "1", "12", "'s", "é", "漢", "👩‍💻", "\u0301", "<", "|>", "\0", ".", " ,"]
)
texts = st.lists(odd | st.text(max_size=6, alphabet=st.characters(exclude_categories=("Cs",))), max_size=5).map("".join)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
conversations = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1, max_size=5)


def plain(model: str, *bodies: str) -> None:
    """Leave out texts that spell a token of the model's vocabulary of control tokens."""
    tokenizer, _ = both(model)
    assume(not any(token in body for token in tokenizer.get_added_vocab() for body in bodies))


@each_model
@given(conversation=conversations, generation=st.booleans())
def test_our_renderer_gives_what_the_models_template_gives(model, conversation, generation):
    plain(model, *(m["content"] for m in conversation))
    tokenizer, renderer = both(model)
    wanted = tokenizer.apply_chat_template(conversation, add_generation_prompt=generation, return_dict=False)
    assert renderer.render_ids(conversation, add_generation_prompt=generation) == list(wanted)


@each_model
@given(conversation=conversations)
def test_a_longer_conversation_starts_with_the_shorter_one(model, conversation):
    _, renderer = both(model)
    whole = renderer.render_ids(conversation)
    for end in range(1, len(conversation)):
        part = renderer.render_ids(conversation[:end])
        assert whole[: len(part)] == part


@each_model
@given(
    conversation=conversations,
    completion=st.lists(st.integers(0, 255), max_size=8),
    stop=st.sampled_from([0, 1, None]),
    new=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts}), min_size=1, max_size=3
    ),
)
def test_a_bridge_starts_with_the_exact_ids_whatever_was_sampled(model, conversation, completion, stop, new):
    tokenizer, renderer = both(model)
    stops = renderer.get_stop_token_ids()
    completion = [token for token in completion if token not in stops] + (
        [] if stop is None else [stops[stop % len(stops)]]
    )
    assume(completion)
    prompt = renderer.render_ids(conversation, add_generation_prompt=True)
    out = renderer.bridge_to_next_turn(prompt, completion, new).token_ids
    assert out[: len(prompt) + len(completion)] == prompt + completion
    rest = out[len(prompt) + len(completion) :]
    if stop is None:
        assert rest.pop(0) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    # What follows the reply is what follows it in any full render.
    reply = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    head = renderer.render_ids(reply)
    assert rest == head[-1:] + renderer.render_ids(reply + new, add_generation_prompt=True)[len(head) :]


@each_model
@given(conversation=conversations, reply=texts, new=texts)
def test_a_bridge_is_the_full_render_where_the_reply_tokenises_to_itself(model, conversation, reply, new):
    plain(model, reply, new, *(m["content"] for m in conversation))
    tokenizer, renderer = both(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    completion = [*tokenizer.encode(reply, add_special_tokens=False), end]
    full = [*conversation, {"role": "assistant", "content": reply}, {"role": "user", "content": new}]
    rendered = renderer.render_ids(full, add_generation_prompt=True)
    prompt = renderer.render_ids(conversation, add_generation_prompt=True)
    assume(rendered[: len(prompt) + len(completion)] == prompt + completion)  # "\n" + reply may merge into one token
    assert renderer.bridge_to_next_turn(prompt, completion, full[-1:]).token_ids == rendered


@each_model
@given(reply=texts)
def test_the_text_of_a_reply_is_what_was_encoded(model, reply):
    plain(model, reply)
    tokenizer, renderer = both(model)
    stop = renderer.get_stop_token_ids()[0]
    if model != "tiny-random":  # SmolLM2 has no tokens for some bytes and drops them
        assume(all(tokenizer.decode(tokenizer.encode(c, add_special_tokens=False)) == c for c in reply))
    ids = np.array([*tokenizer.encode(reply, add_special_tokens=False), stop], np.int32)
    assert reply_message(renderer, ids, ids) == text_message("assistant", reply)


@each_model
@given(
    body=st.lists(
        odd | st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "\ud800"])
    ).map("".join)
)
def test_a_body_never_holds_a_control_token(model, body):
    tokenizer, renderer = both(model)
    prompt, _ = render_prompt(renderer, (text_message("system", body), text_message("user", body)), None, 0)
    bare, _ = render_prompt(renderer, (text_message("system", ""), text_message("user", "")), None, 0)
    for token in tokenizer.all_special_ids:
        assert (prompt == token).sum() == (bare == token).sum()
