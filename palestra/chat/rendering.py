"""Which renderer a model gets, and the two steps that a session needs: messages to a prompt, ids to a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from palestra.chat.chatml import ChatMLConfig, ChatMLRenderer
from palestra.schemas.messages import ChatMessage, text_message
from palestra.schemas.records import Ids

_PROBES: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Hi."},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 + 1?\n"}),
    (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "é 漢字"},
    ),
)


class Renderer(Protocol):
    """The part of the `renderers` protocol that is used here."""

    def render_ids(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """A whole conversation."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
    ) -> Any:
        """An extension of a conversation whose last reply was sampled; None where it can't be had."""
        ...

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Any:
        """Text, reasoning and tool calls of a reply."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a reply."""
        ...


def select_renderer(tokenizer: Any) -> Renderer:
    """The renderer for a transformers tokenizer.

    One made for the model's name in `renderers`; else ours, if it gives exactly what the model's own ChatML template
    gives on some conversations; else the template itself, which has no bridge.
    """
    from renderers import DefaultRendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    if getattr(tokenizer, "name_or_path", None) in MODEL_RENDERER_MAP:
        renderer: Renderer = create_renderer(tokenizer)
        return renderer
    return _matching_chatml(tokenizer) or create_renderer(tokenizer, DefaultRendererConfig())


def _matching_chatml(tokenizer: Any) -> ChatMLRenderer | None:
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or "<|im_start|>" not in template:
        return None
    alone = tokenizer.apply_chat_template(list(_PROBES[0]), tokenize=False)
    head, close, _ = alone.partition("<|im_end|>")
    system = head.removeprefix("<|im_start|>system\n") if close and head.startswith("<|im_start|>system\n") else None
    try:
        renderer = ChatMLRenderer(tokenizer, ChatMLConfig(default_system=system))
    except ValueError:
        return None
    for probe in _PROBES:
        wanted = tokenizer.apply_chat_template(
            list(probe), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        if list(wanted) != renderer.render_ids(probe, add_generation_prompt=True):
            return None
    return renderer


def render_prompt(
    renderer: Renderer, messages: Sequence[ChatMessage], parent: tuple[Ids, Ids] | None, new_from: int
) -> tuple[Ids, int]:
    """The prompt of a call, and how many of its leading ids are the parent's prompt and completion.

    `parent` is the (prompt ids, completion ids) of an earlier call whose messages and reply are the first `new_from`
    messages. Where the renderer can extend it, its exact ids are reused; otherwise all is rendered afresh.
    """
    if parent is not None:
        prompt, completion = parent
        bridged = renderer.bridge_to_next_turn(
            prompt.tolist(), completion.tolist(), [_plain(m) for m in messages[new_from:]]
        )
        if bridged is not None:
            return np.asarray(bridged.token_ids, np.int32), len(prompt) + len(completion)
    ids = renderer.render_ids([_plain(m) for m in messages], add_generation_prompt=True)
    return np.asarray(ids, np.int32), 0


def reply_message(renderer: Renderer, completion_ids: Ids, prompt_ids: Ids) -> ChatMessage:
    """The assistant's message that a completion stands for."""
    parsed = renderer.parse_response(completion_ids.tolist(), prompt_ids=prompt_ids.tolist())
    return text_message("assistant", parsed.content)


def _plain(message: ChatMessage) -> dict[str, str]:
    return {"role": message.role, "content": message.text}
