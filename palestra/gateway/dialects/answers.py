"""What the answers of several dialects have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.schemas.records import Chat
from palestra.session import CallStart


def answer_id(kind: str, call: Chat | CallStart) -> str:
    """Return the name of an answer, after its first call; a retry that gets the same call gets the same name.

    Args:
        kind: with which the format begins such names, such as `chatcmpl`.
        call: the first of the answer.
    """
    return f"{kind}-{call.episode_id}-{call.fence}-{call.index}"


def fingerprint(chats: Sequence[Chat]) -> str:
    """Return OpenAI's `system_fingerprint`: the policy's version with which the last token was sampled."""
    return f"version-{chats[-1].versions[-1].version}"


def usage_of(chats: Sequence[Chat], choices: int) -> dict[str, Any]:
    """Return OpenAI's `usage` of an answer.

    Args:
        chats: all choices of all prompts.
        choices: of one prompt, whose tokens count once.
    """
    prompts = chats[::choices]
    prompt = sum(chat.prompt_tokens for chat in prompts)
    sampled = sum(len(chat.completion_ids) for chat in chats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(chat.shared for chat in prompts)},
    }
