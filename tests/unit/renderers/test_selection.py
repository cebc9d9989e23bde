from __future__ import annotations

import numpy as np
import pytest
from conformance.fixtures import QWEN25
from rendering import render_ids

from palestra.renderers import ChatMLRenderer, PackageRenderer, select_renderer
from palestra.renderers.probes import NAMES, ROLES, unseen_of
from palestra.types.messages import text_message
from unit.building import ids

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + OPEN
# Qwen2.5's format, in a template of our own.
OFFER = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function' }}
{{- ' signatures within <tools></tools> XML tags:\n<tools>\n' }}
{%- for t in tools %}{{ t | tojson + '\n' }}{% endfor %}
{{- '</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}{% endif %}"""
MESSAGES = """{%- for m in messages %}{% if m.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- elif not (tools and loop.first and m.role == 'system') %}{{ '<|im_start|>' + m.role }}
{%- if m.content or not m.tool_calls %}{{ '\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"""
QWEN_LIKE = OFFER + MESSAGES + OPEN


def tiny(template: str):
    from palestra.models.causal_lm import load_tokenizer

    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = template
    return tokenizer


def test_tiny_random_gets_our_renderer_without_a_default_system_message(tiny_renderer):
    assert isinstance(tiny_renderer, ChatMLRenderer)
    assert tiny_renderer.config.default_system is None
    assert tiny_renderer.config.developer == "developer"


@pytest.mark.model
def test_smollm2_gets_our_renderer_with_its_default_system_message(smollm_renderer):
    assert isinstance(smollm_renderer, ChatMLRenderer)
    assert smollm_renderer.config.default_system.startswith("You are a helpful AI assistant named SmolLM")


def test_a_template_with_tools_in_our_format_gets_ours():
    tokenizer = tiny(QWEN_LIKE)
    renderer = select_renderer(tokenizer)
    assert isinstance(renderer, ChatMLRenderer)
    for messages, tools, _ in QWEN25:
        wanted = tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert render_ids(renderer, messages, tools=tools, add_generation_prompt=True) == wanted


def test_a_template_that_drops_developers_gets_them_as_system_messages():
    renderer = select_renderer(tiny(QWEN_LIKE.replace("{%- elif not (", "{%- elif m.role != 'developer' and not (")))
    assert isinstance(renderer, ChatMLRenderer)
    assert renderer.config.developer == "system"


def test_a_template_that_refuses_what_it_does_not_know_still_gets_ours():
    refusing = PLAIN.replace(
        TURN, "{% if m.role in ('tool', 'developer') %}{{ raise_exception('no') }}{% endif %}" + TURN
    )
    assert isinstance(select_renderer(tiny(refusing)), ChatMLRenderer)


def test_a_template_with_reasoning_in_our_format_gets_ours():
    thought = "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content else '' }}"
    kept = PLAIN.replace(TURN, TURN.replace(" + m['content']", " }}" + thought + "{{ m['content']"))
    assert isinstance(select_renderer(tiny(kept)), ChatMLRenderer)
    assert not isinstance(select_renderer(tiny(kept.replace("</think>\n\n", "</think>"))), ChatMLRenderer)


def qwen3_like():
    """Reasoning is shown in the cycle of tools that it belongs to, and dropped when the user speaks again."""
    asked = "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    asked += "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    thought = "{%- set thought = '<think>\n' + m.reasoning_content + '\n</think>\n\n' "
    thought += "if m.reasoning_content and loop.index0 > ns.last else '' %}"
    template = QWEN_LIKE.replace("{%- if m.content or not", thought + "{%- if m.content or thought or not")
    template = template.replace("{{ '\n' + m.content }}", "{{ '\n' + thought + m.content }}")
    template = template.replace(
        "{{- '\n<tool_call>", "{{- '' if thought and not m.content and loop.first else '\n' }}{{- '<tool_call>"
    )
    tokenizer = tiny(asked + template)
    tokenizer.add_tokens([f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")])
    return tokenizer


def test_a_model_reasons_where_its_template_has_a_place_for_that(tiny_renderer):
    thought = "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content else '' }}"
    kept = PLAIN.replace(TURN, TURN.replace(" + m['content']", " }}" + thought + "{{ m['content']"))
    assert select_renderer(tiny(kept)).reasons
    assert select_renderer(qwen3_like()).reasons
    for template in (PLAIN, QWEN_LIKE, PLAIN.replace("m['content']", "m['content'] | trim")):
        assert not select_renderer(tiny(template)).reasons
    opening = PLAIN.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert select_renderer(tiny(opening)).reasons
    assert not tiny_renderer.reasons


def test_a_model_without_a_name_gets_the_renderer_of_the_package_that_writes_what_its_template_writes():
    tokenizer = qwen3_like()
    renderer = select_renderer(tokenizer)
    assert isinstance(renderer, PackageRenderer)
    assert renderer.config.name == "qwen3"
    prompt = renderer.render([text_message("user", "hello")]).ids
    call = text_message("assistant", "so")
    completion = np.array([*tokenizer.encode(call.text), renderer.stop_ids[0]], np.int32)
    assert renderer.extend(lambda: prompt, completion, [text_message("tool", "2")]) is not None


def test_a_renderer_of_the_package_can_be_made_to_go_on_from_reasoning_that_its_template_would_drop():
    tokenizer = qwen3_like()
    for keep, wanted in ((False, False), (True, True)):
        renderer = select_renderer(tokenizer, keep_reasoning=keep)
        prompt = renderer.render([text_message("user", "hello")]).ids
        thought = tokenizer.encode("<think>\nhm\n</think>\n\nso")
        completion = np.array([*thought, renderer.stop_ids[0]], np.int32)
        again = renderer.extend(lambda prompt=prompt: prompt, completion, [text_message("user", "and?")])
        assert (again is not None) == wanted


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("m['content']", "m['content'] | trim"),
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: ",
        PLAIN.replace("<|im_end|>\n", "<|im_end|>"),
        # tools in other formats
        "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}" + PLAIN,
        QWEN_LIKE.replace("| tojson + '\n'", "| tojson + ','"),
        QWEN_LIKE.replace("<tool_response>", "<result>"),
        QWEN_LIKE.replace("c.function.arguments | tojson", "c.function.arguments | string"),
        QWEN_LIKE.replace("{{- '<|im_start|>user' if", "{{- '<|im_start|>tool' if"),
        PLAIN.replace(TURN, TURN + "{{ m.tool_calls | tojson if m.tool_calls else '' }}"),
        PLAIN.replace("m['role']", "(m['role'] if m['role'] != 'tool' else 'observation')"),
    ],
)
def test_a_template_that_is_not_exactly_ours_is_left_to_itself(template):
    tokenizer = tiny(template)
    renderer = select_renderer(tokenizer)
    assert not isinstance(renderer, ChatMLRenderer)
    messages = [{"role": "user", "content": " hello "}]
    assert render_ids(renderer, messages, add_generation_prompt=True) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert renderer.extend(lambda: ids(1, 2), ids(3), (text_message("user", "more"),)) is None


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        ("", set()),
        # A result without a name gets that of its call, which is found by the id.
        ("{{ m.name or '' }}", {*((role, "name") for role in ROLES), ("tool", "tool_call_id")}),
        ("{{ m.name if m.name and m.role == 'assistant' else '' }}", {("assistant", "name")}),
        ("{{ m.tool_call_id or '' }}", {("tool", "tool_call_id")}),
    ],
)
def test_a_renderer_knows_which_names_its_template_shows(shown, seen):
    turns = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}" + shown + "{{ '\n' }}{% endfor %}assistant: "
    renderer = select_renderer(tiny(turns))
    assert not isinstance(renderer, ChatMLRenderer)
    assert renderer.unseen == NAMES - seen


def test_our_format_shows_no_names(tiny_renderer):
    assert tiny_renderer.unseen == unseen_of(lambda messages: tiny_renderer.render(messages).ids.tolist()) == NAMES
