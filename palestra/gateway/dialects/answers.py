"""Parts of answers that several dialects have in common: ids, usage, fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.schemas.records import Chat
from palestra.session import CallStart


def answer_id(kind: str, call: Chat | CallStart) -> str:
    """Return the id of an answer, made from its first call, so that a retry that gets the same call gets the same id.

    Args:
        kind: prefix of such ids in the format, such as `chatcmpl`.
        call: the first call of the answer.
    """
    return f"{kind}-{call.episode_id}-{call.fence}-{call.index}"


def fingerprint(chats: Sequence[Chat]) -> str:
    """Return OpenAI's `system_fingerprint`: here the version of the policy that sampled the last token."""
    return f"version-{chats[-1].versions[-1].version}"


def usage_of(chats: Sequence[Chat], choices: int) -> dict[str, Any]:
    """Return OpenAI's `usage` of an answer.

    Args:
        chats: all choices of all prompts.
        choices: number of choices of each prompt; a prompt's tokens count once.
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
