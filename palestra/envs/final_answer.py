"""What an agent hands in."""

from __future__ import annotations

import json

from palestra.schemas.messages import ChatMessage
from palestra.tools import FINISH


def final_answer(action: ChatMessage) -> str | None:
    """The argument of `finish`, or the text of an action without calls; None: the agent wants to go on."""
    if not action.tool_calls:
        return action.text
    for call in action.tool_calls:
        if call.function.name == FINISH:
            try:
                return str(json.loads(call.function.arguments)["answer"])
            except (ValueError, KeyError, TypeError, RecursionError):
                return None  # the manager tells the model what is wrong with it
    return None
