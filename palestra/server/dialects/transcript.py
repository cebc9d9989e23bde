"""Assembles messages for dialects that split a reply into items or blocks.

The next call can only extend the exact tokens of a reply if the assembled reply equals the recorded one.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.types.messages import ChatMessage, FunctionCall, Part, Role, TextPart, ToolCall, text_message


class Transcript:
    """Collects the parts of a conversation, in order, into messages."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._calls: list[ToolCall] = []  # calls to add to the last message
        self._open = False  # whether the last message is a reply that may continue

    def say(self, role: Role, content: str | Sequence[Part]) -> None:
        """Add text, or parts with pictures.

        The assistant's text becomes one message with the reasoning before it and the calls after it.
        """
        last = self._messages[-1] if self._messages else None
        if (
            role == "assistant"
            and self._open
            and last is not None
            and not (last.text or last.tool_calls or self._calls)
        ):
            self._messages[-1] = _message("assistant", content).model_copy(
                update={"reasoning_content": last.reasoning_content}
            )
            return
        self._add(_message(role, content))
        self._open = role == "assistant"

    def think(self, text: str) -> None:
        """Add reasoning, which begins a reply of the assistant."""
        if text:
            self._add(text_message("assistant", "").model_copy(update={"reasoning_content": text}))
            self._open = True

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant. `call_id`: the result refers to it."""
        made = ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))
        if not self._open:
            self._add(text_message("assistant", ""))
            self._open = True
        self._calls.append(made)

    def result(self, call_id: str, content: str | Sequence[Part]) -> None:
        """Add the result of a tool call: text or parts with pictures."""
        self._add(_message("tool", content).model_copy(update={"tool_call_id": call_id}))
        self._open = False

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """Return the messages of the conversation so far."""
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


def recorded_content(parts: Sequence[Part]) -> str | Sequence[Part]:
    """Return parts as one text if all are text, which is how replies are recorded; otherwise unchanged."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "".join(texts) if len(texts) == len(parts) else parts


def _message(role: Role, content: str | Sequence[Part]) -> ChatMessage:
    if isinstance(content, str):
        return text_message(role, content)
    return ChatMessage(role=role, content=tuple(content))
