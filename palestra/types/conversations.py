"""A conversation as a task, which `algorithm.name = "sft"` learns from if it has no run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.errors import ConfigError
from palestra.types.messages import MAX_TOOLS, ChatMessage, ToolSpec
from palestra.types.records import Task
from palestra.types.wire import Reward

# Each reply is a call of its own, and each prompt is rendered, so that the work grows with their number.
MAX_REPLIES = 1_000


class _Conversation(BaseModel):
    """The keys of a conversation; other keys of the task are stored with the episode."""

    model_config = ConfigDict(extra="ignore")

    messages: tuple[ChatMessage, ...]
    tools: Annotated[tuple[ToolSpec, ...], Field(max_length=MAX_TOOLS)] = ()
    reward: Reward = 1.0


def read_conversation(task: Task) -> tuple[tuple[ChatMessage, ...], tuple[dict[str, Any], ...], float]:
    """Return messages, tools and reward of a task that is a conversation."""
    try:
        found = _Conversation.model_validate(task.data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        said = (
            "it has no `messages`" if (place, first["type"]) == ("messages", "missing") else f"{place}: {first['msg']}"
        )
        raise ConfigError(
            f"task {task.task_id!r} is no conversation, which algorithm.name = 'sft' needs without from_run: {said}"
        ) from error
    replies = sum(message.role == "assistant" for message in found.messages)
    if not replies:
        raise ConfigError(f"task {task.task_id!r} has no message of the role assistant, so nothing to learn")
    if replies > MAX_REPLIES:
        raise ConfigError(
            f"task {task.task_id!r} has {replies:,} replies, and a conversation has at most {MAX_REPLIES:,}; cut it "
            "into several"
        )
    # Templates get the tools as they were given, because the order of their keys is a part of the prompt.
    return found.messages, tuple(map(dict, task.data.get("tools", ()))), found.reward
