"""Why a call does not start with the exact ids of the one that its messages go on from. One table for all texts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ForkReason(StrEnum):
    """What came between a call and the exact ids of an earlier one; `MEANINGS` has it in words."""

    EDITED_MESSAGE = "edited_message"
    REASONING_STRIPPED = "reasoning_stripped"
    WHITESPACE_STRIPPED = "whitespace_stripped"
    TOOL_ARGUMENTS = "tool_arguments"
    TOKENIZATION = "tokenization"
    TEMPLATE = "template"
    TOOLS_CHANGED = "tools_changed"
    TRUNCATED_TURN = "truncated_turn"
    NEW_CONVERSATION = "new_conversation"

    @property
    def is_drift(self) -> bool:
        """Whether a call that meant to go on could not."""
        return self is not ForkReason.NEW_CONVERSATION


MEANINGS = {
    ForkReason.EDITED_MESSAGE: "an earlier message was changed, left out or summarised",
    ForkReason.REASONING_STRIPPED: "the reasoning of a reply was dropped, by the agent or by the template",
    ForkReason.WHITESPACE_STRIPPED: "a reply came back with other white space around it, and no other change",
    ForkReason.TOOL_ARGUMENTS: "a tool call was written anew, with other arguments",
    ForkReason.TOKENIZATION: "the same text, rendered anew, has other ids",
    ForkReason.TEMPLATE: "the template writes an earlier message with another text",
    ForkReason.TOOLS_CHANGED: "other tools were offered",
    ForkReason.TRUNCATED_TURN: "a reply was cut at its token limit, and the template can't go on from it",
    ForkReason.NEW_CONVERSATION: "a subagent, another attempt, or a history replaced as a whole; no drift",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Where a call left the exact ids of an earlier one, and why."""

    reason: ForkReason
    call: int | None  # index of the earlier call; None: a conversation of its own from the first message on
    message: int  # the first message that differs
    position: int  # the first token that differs
