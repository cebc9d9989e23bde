"""Facts about the model calls that a reward function may have parameters for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.errors import InvalidEnvironment
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, TextPart

FACTS = ("finish_reason", "messages", "calls", "prompt_tokens", "completion_tokens", "completion_ids")


def reward_facts(calls: Sequence[Chat]) -> dict[str, Any]:
    """Return the facts about an answer from its model calls; empty without calls.

    Args:
        calls: of the agent that answered, in order; the last one is the answer.

    Returns:
        finish_reason: why the answer ended: `stop`, `length` (it was cut), `tool_calls`, …
        messages: the conversation up to the answer, in OpenAI's shape.
        calls: the recorded calls.
        prompt_tokens: of all calls.
        completion_tokens: that all calls have sampled.
        completion_ids: token ids of the answer.
    """
    if not calls:
        return {}
    last = calls[-1]
    known = {
        "finish_reason": last.finish_reason,
        "messages": [openai_message(message) for message in (*last.messages, last.reply)],
        "calls": tuple(calls),
    }
    if not all(call.versions for call in calls):  # a worker elsewhere does not get the tokens of its calls
        return known
    return known | {
        "prompt_tokens": sum(call.prompt_tokens for call in calls),
        "completion_tokens": sum(len(call.completion_ids) for call in calls),
        "completion_ids": last.completion_ids.tolist(),
    }


def openai_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message in OpenAI's shape; text-only content is a string."""
    found = message.model_dump(exclude_defaults=True) | {"role": message.role}
    if all(isinstance(part, TextPart) for part in message.content):
        found["content"] = message.text
    return found


def asked_facts(name: str, needed: Sequence[str], wanted: Sequence[str], calls: Sequence[Chat]) -> Mapping[str, Any]:
    """Return the facts that a reward function has parameters for.

    Args:
        needed: parameters without defaults.
    """
    known = reward_facts(calls) if wanted else {}
    if missing := [fact for fact in needed if fact not in known]:
        raise InvalidEnvironment(
            f"{name} needs {' and '.join(missing)}, which is not known here: the environment is played on another "
            "machine than the job, or without a model; give the argument a default"
        )
    return {fact: known[fact] for fact in wanted if fact in known}
