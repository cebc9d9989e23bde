"""Assembles messages from the parts of a conversation, for dialects that split a reply into items or blocks.

Only a whole reply equals the recorded one, and only then can the next call extend its exact tokens.
"""

from __future__ import annotations

from palestra.types.messages import ChatMessage, FunctionCall, Role, ToolCall, text_message


class Transcript:
    """Collects the parts of a conversation, in order, into messages."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._calls: list[ToolCall] = []  # calls to add to the last message
        self._open = False  # whether the last message is a reply that may continue

    def say(self, role: Role, text: str) -> None:
        """Add text. The assistant's text becomes one message with the reasoning before it and the calls after it."""
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
        """Add reasoning, which begins a reply of the assistant."""
        if text:
            self._add(text_message("assistant", "").model_copy(update={"reasoning_content": text}))
            self._open = True

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant.

        Args:
            call_id: id by which the call's result refers to it.
            name: name of the tool.
            arguments: JSON, as the model wrote it.
        """
        made = ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))
        if not self._open:
            self._add(text_message("assistant", ""))
            self._open = True
        self._calls.append(made)

    def result(self, call_id: str, text: str) -> None:
        """Add the result `text` of the tool call `call_id`."""
        self._add(text_message("tool", text).model_copy(update={"tool_call_id": call_id}))
        self._open = False

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """Return the conversation so far, as messages."""
        self._give_calls()
        return tuple(self._messages)

    def _add(self, message: ChatMessage) -> None:
        self._give_calls()
        self._messages.append(message)

    def _give_calls(self) -> None:
        """Add the collected calls to the last message, all together: one by one they would take quadratic time."""
        if self._calls:
            last = self._messages[-1]
            self._messages[-1] = last.model_copy(update={"tool_calls": (*last.tool_calls, *self._calls)})
            self._calls.clear()
