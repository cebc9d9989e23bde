"""Our renderers are renderers in the sense of the `renderers` package, and what a session is given is one."""

from __future__ import annotations

import pytest
import renderers

from palestra.chat import ByteTokenizer, ChatMLRenderer, select_renderer
from palestra.models.causal_lm import load_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":  [1, 2]}'}}
WITH_TOOLS = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
    {"role": "tool", "tool_call_id": "c", "content": ""},
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
]


@pytest.fixture(params=["bytes", "tiny-random", pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.model)])
def renderer(request):
    if request.param == "bytes":
        return ChatMLRenderer(ByteTokenizer())
    return select_renderer(load_tokenizer(request.param))


def test_it_is_a_renderer_of_the_package(renderer):
    assert isinstance(renderer, renderers.Renderer)
    assert isinstance(renderer.config, renderers.BaseRendererConfig)


def test_it_is_prefix_stable_as_it_declares(renderer):
    assert renderer.is_prefix_stable
    shorter = renderer.render_ids(CONVERSATION[:3])
    assert renderer.render_ids(CONVERSATION)[: len(shorter)] == shorter


def test_attribution_covers_every_token(renderer):
    out = renderer.render(CONVERSATION, add_generation_prompt=True)
    assert len(out.token_ids) == len(out.message_indices) == len(out.sampled_mask)
    assert set(out.message_indices) == {-1, 0, 1, 2, 3}
    assert {i for i, s in zip(out.message_indices, out.sampled_mask, strict=True) if s} == {2}
    assert out.token_ids == renderer.render_ids(CONVERSATION, add_generation_prompt=True)


def test_a_bridge_is_the_rest_of_the_full_render(renderer):
    prompt = renderer.render_ids(CONVERSATION[:2], add_generation_prompt=True)
    whole = renderer.render_ids(CONVERSATION, add_generation_prompt=True)
    stop = renderer.get_stop_token_ids()[0]
    completion = whole[len(prompt) : whole.index(stop, len(prompt)) + 1]
    out = renderer.bridge_to_next_turn(prompt, completion, CONVERSATION[3:])
    assert out.token_ids == whole
    assert len(out.message_indices) == len(out.sampled_mask) == len(whole)
    assert not any(out.sampled_mask)


def test_a_reply_is_parsed_with_and_without_its_stop_token(renderer):
    ids = renderer.render_ids(CONVERSATION[:3])
    prompt = renderer.render_ids(CONVERSATION[:2], add_generation_prompt=True)
    stop = renderer.get_stop_token_ids()[0]
    completion = ids[len(prompt) : ids.index(stop, len(prompt)) + 1]
    assert renderer.parse_response(completion).content == "2"
    assert renderer.parse_response(completion[:-1], prompt_ids=prompt).content == "2"


def test_attribution_covers_every_token_of_tools_too(renderer):
    out = renderer.render(WITH_TOOLS, tools=[TOOL], add_generation_prompt=True)
    assert out.token_ids == renderer.render_ids(WITH_TOOLS, tools=[TOOL], add_generation_prompt=True)
    assert len(out.token_ids) == len(out.message_indices) == len(out.sampled_mask)
    assert set(out.message_indices) == {-1, 0, 1, 2, 3}
    assert {i for i, s in zip(out.message_indices, out.sampled_mask, strict=True) if s} == {1}


def test_what_is_rendered_as_a_reply_is_parsed_as_the_same_reply(renderer):
    prompt = renderer.render_ids(WITH_TOOLS[:1], tools=[TOOL], add_generation_prompt=True)
    whole = renderer.render_ids(WITH_TOOLS[:2], tools=[TOOL])
    assert whole[: len(prompt)] == prompt
    parsed = renderer.parse_response(whole[len(prompt) : -1], tools=[TOOL], prompt_ids=prompt)
    assert (parsed.content, parsed.reasoning_content) == ("So.", "Hm.")
    assert [(c.name, c.arguments, c.status) for c in parsed.tool_calls] == [("add", '{"a":  [1, 2]}', "ok")] * 2


def test_a_call_that_is_cut_off_is_an_attempt_that_failed(renderer):
    prompt = renderer.render_ids(WITH_TOOLS[:1], tools=[TOOL], add_generation_prompt=True)
    whole = renderer.render_ids(WITH_TOOLS[:2], tools=[TOOL])
    parsed = renderer.parse_response(whole[len(prompt) : -8], tools=[TOOL])
    assert [c.status for c in parsed.tool_calls] == ["ok", "malformed_structure"]


def test_a_bridge_over_results_of_tools_is_the_rest_of_the_full_render(renderer):
    prompt = renderer.render_ids(WITH_TOOLS[:1], tools=[TOOL], add_generation_prompt=True)
    whole = renderer.render_ids(WITH_TOOLS, tools=[TOOL], add_generation_prompt=True)
    stop = renderer.get_stop_token_ids()[0]
    completion = whole[len(prompt) : whole.index(stop, len(prompt)) + 1]
    assert renderer.bridge_to_next_turn(prompt, completion, WITH_TOOLS[2:], tools=[TOOL]).token_ids == whole
