"""Every renderer over generated conversations: no bridge that is not exact, and none of ours that is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from rendering import render_ids

from conformance import vocabularies
from conformance.conversations import conversations
from conformance.families import NEEDS_THE_NETWORK, QWEN, TINY, of_the_package, ours
from conformance.fixtures import QWEN25
from conformance.simulation import simulate
from palestra.renderers import select_renderer
from palestra.types.messages import text_message

RUNS = list(conversations(1, 10))
OURS = {family.name: family for family in ours()}
PACKAGE = {family.name: family for family in of_the_package()}


def marked(name: str):
    return pytest.param(name, marks=() if name == TINY else pytest.mark.model)


def test_the_conversations_have_everything_in_them():
    intents = [e.intent for c in RUNS for e in c.exchanges]
    exchanges = [e for c in RUNS for e in c.exchanges]
    assert any(len(i.calls) > 1 for i in intents)
    assert any(i.reasoning for i in intents)
    assert any(i.truncated for i in intents)
    assert any(i.split for i in intents)
    assert any(i.content == "" and not i.calls for i in intents)
    assert {e.edit for e in exchanges} == {"", "system", "reply"}
    assert {c.echoes_reasoning for c in RUNS} == {True, False}
    assert any(not c.tools for c in RUNS)
    assert any(not c.question.isascii() for c in RUNS)


def test_the_same_seed_gives_the_same_conversations():
    assert list(conversations(1, 10)) == RUNS
    assert list(conversations(2, 10)) != RUNS


@pytest.mark.parametrize("name", [marked(name) for name in OURS])
def test_our_bridge_is_always_there_and_always_exact(name):
    tally = simulate(*OURS[name].make(), RUNS)
    assert tally.turns > 20
    assert tally.drift_with == tally.refused == 0
    assert tally.calls > 10
    assert tally.drift_without > 0, "the conversations would not show what the bridge is for"


@pytest.mark.parametrize("name", [marked(name) for name in PACKAGE])
def test_a_bridge_of_the_package_is_exact_or_refused(name):
    tally = simulate(*PACKAGE[name].make(), RUNS)
    assert tally.turns > 20
    assert tally.inexact == 0
    assert tally.drift_with <= tally.refused
    assert tally.drift_with <= tally.drift_without


@pytest.mark.parametrize("name", [marked(name) for name in [*OURS, *PACKAGE]])
def test_no_ids_are_too_odd_to_be_a_reply(name):
    """Control tokens in any order, halves of calls, JSON nested deeper than a parser can go."""
    renderer, tokenizer = {**OURS, **PACKAGE}[name].make()
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    user = text_message("user", "so")
    prompt = renderer.render([user], tools).ids
    random, specials = Random(0), tokenizer.all_special_ids
    control = [[token] for token in random.sample(specials, min(16, len(specials)))]
    pieces = [
        '{"name": "f", "arguments": {}}',
        '"',
        "{",
        "f",
        "<parameter=a>",
        "null",
        "\n",
        "<tool_call>",
        "</tool_call>",
    ]
    plain = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    deep = tokenizer.encode('{"name": "f", "arguments": ' + '{"a":' * 1500, add_special_tokens=False)
    replies = [sum(random.choices([*control, *plain], k=random.randint(0, 12)), []) for _ in range(30)]  # noqa: RUF017
    replies += [[*before, *deep, *after] for before in control for after in random.sample(control, 1)]
    for ids in replies:
        reply = renderer.parse(np.array(ids, np.int32), lambda: prompt, tools)
        assert all(isinstance(json.loads(c.function.arguments), dict) for c in reply.message.tool_calls)
        renderer.extend(lambda: prompt, np.array(ids, np.int32), [user], tools)
        renderer.render([user, reply.message, user], tools)


def test_every_renderer_of_the_package_is_run_or_named():
    from renderers.base import RENDERER_REGISTRY

    assert set(PACKAGE) | NEEDS_THE_NETWORK == set(RENDERER_REGISTRY)


needs_qwen = pytest.mark.skipif(
    not vocabularies.at_hand(vocabularies.qwen25), reason="its tokenizer comes with `make conformance`"
)


@needs_qwen
@pytest.mark.parametrize("case", range(len(QWEN25)))
def test_the_fixtures_are_what_qwens_template_writes(case):
    messages, tools, text = QWEN25[case]
    tokenizer = vocabularies.qwen25()
    given = {"tools": tools or None, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(messages, tokenize=False, **given) == text
    ids = tokenizer.apply_chat_template(messages, return_dict=False, **given)
    assert render_ids(select_renderer(tokenizer), messages, tools=tools, add_generation_prompt=True) == ids


@needs_qwen
def test_ours_gives_what_qwens_template_gives_on_generated_conversations():
    tokenizer = vocabularies.qwen25()
    renderer = select_renderer(tokenizer)
    for conversation in conversations(3, 300):
        messages = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
        messages.append({"role": "user", "content": conversation.question})
        for exchange in conversation.exchanges:
            said = replace(exchange.intent, reasoning=None).as_dict()  # which this template leaves out
            for call in said.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            messages.append(said)
            messages += [{"role": "tool", "content": exchange.result} for _ in exchange.intent.calls]
            messages += [{"role": "user", "content": ask} for ask in exchange.asks]
        given = {"tools": list(conversation.tools) or None, "add_generation_prompt": True}
        wanted = tokenizer.apply_chat_template(messages, return_dict=False, **given)
        assert render_ids(renderer, messages, **given) == wanted


@needs_qwen
def test_qwen25_is_among_ours():
    assert QWEN in OURS
    assert OURS[QWEN].make()[0].config.default_system.startswith("You are Qwen")


@pytest.mark.model
def test_smollm2_has_no_place_for_tools_and_gets_the_convention():
    renderer, tokenizer = OURS["SmolLM2"].make()
    messages, tools, text = QWEN25[3]
    assert tokenizer.decode(render_ids(renderer, messages, tools=tools, add_generation_prompt=True)) == text
    assert "<tools>" not in tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
