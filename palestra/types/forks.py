"""Why a call does not start with the exact ids of an earlier one. One table of texts for all who show it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ForkReason(StrEnum):
    """Why a prompt could not reuse the token ids of an earlier call. `MEANINGS` holds the text shown to users."""

    EDITED_MESSAGE = "edited_message"
    PICTURE_CHANGED = "picture_changed"
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
        """Return whether the agent meant to continue an earlier call, so that exact tokens were lost."""
        return self is not ForkReason.NEW_CONVERSATION


# One table, so that the docs, the metrics and the episode view explain a reason in the same words.
MEANINGS = {
    ForkReason.EDITED_MESSAGE: "an earlier message was changed, left out or summarised",
    ForkReason.PICTURE_CHANGED: "an earlier message came back with other pictures, and with the same text",
    ForkReason.REASONING_STRIPPED: "the reasoning of a reply was dropped, by the agent or by the template",
    ForkReason.WHITESPACE_STRIPPED: "a reply came back with other white space around it, and no other change",
    ForkReason.TOOL_ARGUMENTS: "a tool call was written again, with other arguments",
    ForkReason.TOKENIZATION: "the same text, rendered again, has other ids",
    ForkReason.TEMPLATE: "the template writes an earlier message with another text",
    ForkReason.TOOLS_CHANGED: "other tools were offered",
    ForkReason.TRUNCATED_TURN: "a reply was cut at its token limit, and the template can't go on from it",
    ForkReason.NEW_CONVERSATION: "a subagent, another attempt, or a history replaced as a whole; no drift",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """The position where a prompt diverges from an earlier call's exact token ids, and the reason.

    Attributes:
        call: index of the earlier call; None: a separate conversation from the first message on.
        message: index of the first different message.
        position: index of the first different token.
    """

    reason: ForkReason
    call: int | None
    message: int
    position: int
