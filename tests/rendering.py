"""Conversations written as dicts, as templates take them, for a `Renderer`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from palestra.renderers import ChatMLRenderer, PackageRenderer, Renderer
from palestra.types.messages import ChatMessage

Dicts = Sequence[dict[str, Any]]


def messages_of(dicts: Dicts) -> list[ChatMessage]:
    """Return messages as agents send them. Arguments of calls may be objects, which become JSON text."""
    return [
        ChatMessage.model_validate({**m, "tool_calls": [_call(c) for c in m.get("tool_calls") or ()]}) for m in dicts
    ]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def render_ids(
    renderer: Renderer, dicts: Dicts, *, tools: Any = None, add_generation_prompt: bool = False
) -> list[int]:
    """Return the ids of a conversation; without the opening of a reply, unless it is asked for."""
    if not add_generation_prompt and isinstance(renderer, PackageRenderer):
        return list(renderer._inner.render_ids(dicts, tools=tools or None))
    whole: list[int] = renderer.render(messages_of(dicts), tools or ()).ids.tolist()
    if add_generation_prompt:
        return whole
    assert isinstance(renderer, ChatMLRenderer)
    return whole[: len(whole) - 1 - whole[::-1].index(whole[0])]  # ChatML begins each turn with the same token


def bridged(
    renderer: Renderer, prompt: Sequence[int], completion: Sequence[int], new: Dicts, tools: Any = None
) -> list[int] | None:
    """Return a prompt, its completion and what follows them; None: the renderer can't go on from them."""
    given = np.asarray(prompt, np.int32)
    rest = renderer.extend(lambda: given, np.asarray(completion, np.int32), messages_of(new), tools or ())
    return None if rest is None else [*prompt, *completion, *rest.ids.tolist()]
