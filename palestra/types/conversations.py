"""Conversations as tasks: one to imitate (`algorithm.name = "sft"`), or a pair to prefer one of (`"dpo"`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from palestra.errors import ConfigError
from palestra.types.messages import MAX_TOOLS, ChatMessage, ImagePart, ToolSpec
from palestra.types.records import Task
from palestra.types.wire import Reward

# Each reply is a call of its own, and each prompt is rendered, so that the work grows with their number.
MAX_REPLIES = 1_000
_CHOSEN, _REJECTED = 1.0, 0.0  # rewards of a pair's replies, for lists and the page
_Messages = tuple[ChatMessage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A recorded conversation.

    Attributes:
        prompt: number of its first messages whose replies are not learned.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...]
    reward: float
    prompt: int = 0


class _Single(BaseModel):
    """The keys of a conversation; other keys of the task are stored with the episode."""

    model_config = ConfigDict(extra="ignore")

    messages: _Messages
    tools: Annotated[tuple[ToolSpec, ...], Field(max_length=MAX_TOOLS)] = ()
    reward: Reward = 1.0


def _texts_as(role: str) -> BeforeValidator:
    """Return a validator that takes a text for the one message of a role."""
    return BeforeValidator(lambda given: [{"role": role, "content": given}] if isinstance(given, str) else given)


_Reply = Annotated[_Messages, _texts_as("assistant")]


class _Pair(BaseModel):
    """The keys of a pair, as data sets for TRL have them: texts or messages; without `prompt`, what both begin with."""

    model_config = ConfigDict(extra="ignore")

    prompt: Annotated[_Messages, _texts_as("user")] = ()
    chosen: _Reply
    rejected: _Reply
    tools: Annotated[tuple[ToolSpec, ...], Field(max_length=MAX_TOOLS)] = ()

    def sides(self) -> tuple[_Messages, _Messages, int]:
        """Return both conversations, and how many messages are their prompt."""
        length = len(self.prompt)
        # Some data sets have the prompt twice: once alone, and once as the beginning of both conversations.
        if self.prompt and not (self.chosen[:length] == self.prompt == self.rejected[:length]):
            return (*self.prompt, *self.chosen), (*self.prompt, *self.rejected), length
        both = zip(self.chosen, self.rejected, strict=False)
        return self.chosen, self.rejected, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def read_conversations(task: Task, *, pairs: bool) -> tuple[Conversation, ...]:
    """Return the conversation of a task, or, for `pairs`, the chosen one and the rejected one. Raises ConfigError: the
    task has none.
    """
    try:
        found = (_Pair if pairs else _Single).model_validate(task.data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        lacks = first["type"] == "missing" and len(first["loc"]) == 1
        said = f"it has no `{place}`" if lacks else f"{place}: {first['msg']}"
        raise ConfigError(f"{_not_one(task, pairs)}: {said}") from error
    # Templates get the tools as they were given, because the order of their keys is a part of the prompt.
    tools = tuple(map(dict, task.data.get("tools", ())))
    if isinstance(found, _Single):
        _check_text(task, found.messages)
        _check_replies(task, found.messages, "")
        return (Conversation(messages=found.messages, tools=tools, reward=found.reward),)
    chosen, rejected, prompt = found.sides()
    if chosen == rejected:
        raise ConfigError(f"{_not_one(task, pairs)}: chosen and rejected are equal")
    if not prompt:
        raise ConfigError(f"{_not_one(task, pairs)}: it has no `prompt`, and chosen and rejected begin differently")
    _check_text(task, (*chosen, *rejected))
    _check_replies(task, chosen[prompt:], " in chosen")
    _check_replies(task, rejected[prompt:], " in rejected")
    return (
        Conversation(messages=chosen, tools=tools, reward=_CHOSEN, prompt=prompt),
        Conversation(messages=rejected, tools=tools, reward=_REJECTED, prompt=prompt),
    )


def _not_one(task: Task, pairs: bool) -> str:
    what, name = ("pair", "dpo") if pairs else ("conversation", "sft")
    return f"task {task.task_id!r} is no {what}, which algorithm.name = {name!r} needs without from_run"


def _check_text(task: Task, messages: _Messages) -> None:
    if any(isinstance(part, ImagePart) for message in messages for part in message.content):
        raise ConfigError(
            f"task {task.task_id!r} has images, and conversations given as tasks have text only; learn from the "
            "episodes of a run with from_run, which keep their images"
        )


def _check_replies(task: Task, learned: _Messages, where: str) -> None:
    replies = sum(message.role == "assistant" for message in learned)
    if not replies:
        raise ConfigError(f"task {task.task_id!r} has no message of the role assistant{where}, so nothing to learn")
    if replies > MAX_REPLIES:
        raise ConfigError(
            f"task {task.task_id!r} has {replies:,} replies, and a conversation has at most {MAX_REPLIES:,}; cut it "
            "into several"
        )
