"""Completions as a model might sample them: in its family's format, in other ids than a tokenizer would choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Any

from rendering import render_ids

from conformance.conversations import Intent


def sample(
    renderer: Any,
    tokenizer: Any,
    prompt: list[int],
    messages: list[dict[str, Any]],
    tools: Any,
    intent: Intent,
    random: Random,
) -> list[int]:
    """Ids of a reply that means `intent`: the family's own rendering, split anew, and cut where it was truncated.

    `prompt` is the renderer's own rendering of `messages`, which a bridged prompt need not be.
    """
    reply = _canonical(renderer, prompt, messages, tools, intent)
    opened = tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
    if opened and "</think>" not in tokenizer.decode(reply):  # the renderer leaves out what the prompt has begun
        reply = tokenizer.encode(f"{intent.reasoning or ''}\n</think>\n\n", add_special_tokens=False) + reply
    if intent.split:
        reply = split_anew(tokenizer, reply, random)
    if intent.truncated:
        reply = reply[: random.randint(1, max(1, len(reply) - 1))]
    return reply


def _canonical(
    renderer: Any, prompt: list[int], messages: list[dict[str, Any]], tools: Any, intent: Intent
) -> list[int]:
    """The rendering of as much of the intent as the family's format can say after this prompt, with a stop token."""
    stops = renderer.stop_ids
    fallback: list[int] = []
    for part in (intent, replace(intent, reasoning=None), replace(intent, calls=intent.calls[:1], reasoning=None)):
        try:
            whole = render_ids(renderer, [*messages, part.as_dict()], tools=tools)
        except ValueError:  # such as: no parallel calls
            continue
        shared = next((k for k, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        reply = whole[shared:]
        end = next((k for k, token in enumerate(reply) if token in stops), None)
        reply = [*reply[:end], stops[0] if end is None else reply[end]]
        if shared == len(prompt):
            return reply
        fallback = fallback or reply
    return fallback


def split_anew(tokenizer: Any, ids: Sequence[int], random: Random) -> list[int]:
    """Other ids of the same text; control tokens stay."""
    control = set(tokenizer.all_special_ids)
    out: list[int] = []
    for is_control, run in groupby(ids, lambda token: token in control):
        piece = list(run)
        out += piece if is_control else _split(tokenizer, piece, random)
    return out


def _split(tokenizer: Any, ids: list[int], random: Random) -> list[int]:
    text = tokenizer.decode(ids)
    cuts = sorted(random.sample(range(1, len(text)), min(len(text) - 1, 1 + len(text) // 8))) if len(text) > 1 else []
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    anew = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
    return anew if tokenizer.decode(anew) == text else ids  # bytes that are no text can't be split here
