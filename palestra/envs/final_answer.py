"""Recognition of the reply with which an agent hands in its answer."""

from __future__ import annotations

import json

from palestra.schemas.messages import ChatMessage
from palestra.tools import FINISH


def final_answer(action: ChatMessage) -> str | None:
    """Return the answer that an action hands in, or None if the episode continues.

    An answer is the argument of a call of `finish`, or the text of an action without calls. None: the action calls
    other tools only, or calls `finish` with bad arguments.
    """
    if not action.tool_calls:
        return action.text
    for call in action.tool_calls:
        if call.function.name == FINISH:
            try:
                return str(json.loads(call.function.arguments)["answer"])
            except (ValueError, KeyError, TypeError, RecursionError):
                # `ToolManager` shows the model an error for this call, and the model may try again.
                return None
    return None
