"""Pieces of a conversation to messages: dialects that send a reply in parts get it put together again.

Only then is it equal to what was recorded, and the next call goes on from its exact tokens.
"""

from __future__ import annotations

from palestra.schemas.messages import ChatMessage, FunctionCall, Role, ToolCall, text_message


class Transcript:
    """Takes the parts in order."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._calls: list[ToolCall] = []  # of the last message, which does not have them yet
        self._open = False  # the last message is a reply that may go on

    def say(self, role: Role, text: str) -> None:
        """Text. The assistant's goes with reasoning in front of it, and before calls."""
        last = self._messages[-1] if self._messages else None
        if (
            role == "assistant"
            and self._open
            and last is not None
            and not (last.text or last.tool_calls or self._calls)
        ):
            self._messages[-1] = text_message("assistant", text).model_copy(
                update={"reasoning_content": last.reasoning_content}
            )
            return
        self._add(text_message(role, text))
        self._open = role == "assistant"

    def think(self, text: str) -> None:
        """Reasoning, with which a reply begins."""
        if text:
            self._add(text_message("assistant", "").model_copy(update={"reasoning_content": text}))
            self._open = True

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool that the assistant called."""
        made = ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))
        if not self._open:
            self._add(text_message("assistant", ""))
            self._open = True
        self._calls.append(made)

    def result(self, call_id: str, text: str) -> None:
        """What the tool answered."""
        self._add(text_message("tool", text).model_copy(update={"tool_call_id": call_id}))
        self._open = False

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The whole conversation."""
        self._give_calls()
        return tuple(self._messages)

    def _add(self, message: ChatMessage) -> None:
        self._give_calls()
        self._messages.append(message)

    def _give_calls(self) -> None:
        """Give the last message its calls, all of them in one go: one by one they would take quadratic time."""
        if self._calls:
            last = self._messages[-1]
            self._messages[-1] = last.model_copy(update={"tool_calls": (*last.tool_calls, *self._calls)})
            self._calls.clear()
