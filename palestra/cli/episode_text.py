"""An episode's conversation as plain text: what was said, without tokens."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, ImagePart
from palestra.types.records import Trajectory

Show = Callable[[str], RenderableType]  # of a picture's digest


def conversation(trajectory: Trajectory, show: Show) -> Group:
    """Return every call with the messages that are new in it, and its reply.

    Args:
        trajectory: of the episode.
        show: returns what is shown of a picture.
    """
    blocks: list[RenderableType] = []
    text = _begun(blocks)
    before: Chat | None = None
    for chat in trajectory.chats:
        title = f"── call {chat.index}, {chat.agent}, step {chat.time_step}"
        if before is not None and chat.parent is not before:
            title += " (from the beginning)" if chat.parent is None else f" (goes on from call {chat.parent.index})"
        text.append(f"{title} ──\n", style="dim")
        for message in chat.new_messages:
            _append(text, message)
            for part in message.content:
                if isinstance(part, ImagePart):
                    text.right_crop(1)  # its newline: the group begins a new line with each block
                    blocks.append(show(part.digest))
                    text = _begun(blocks)
        if not chat.new_messages:
            text.append("(a prompt of token ids or raw text)\n", style="dim")
        _append(text, chat.reply, "cut at its limit" if chat.finish_reason == "length" else "")
        before = chat
    if not trajectory.chats:
        text.append("no calls\n", style="dim")
    rewards = trajectory.episode.rewards
    text.append("no reward" if rewards is None else f"reward {trajectory.episode.reward:g}", style="bold")
    for name, value in sorted((trajectory.episode.named_rewards or {}).items()):
        text.append(f"\n{name}: {'not scored' if value is None else f'{value:g}'}")
    return Group(*blocks)


def _begun(blocks: list[RenderableType]) -> Text:
    """Return a new text at the end of the blocks."""
    text = Text()
    blocks.append(text)
    return text


def _append(text: Text, message: ChatMessage, note: str = "") -> None:
    name = f" {message.name}" if message.name else ""
    text.append(f"[{message.role}{name}]{f' ({note})' if note else ''}\n", style="bold cyan")
    if message.reasoning_content:
        text.append(f"(thought) {message.reasoning_content}\n", style="dim")
    if message.text:
        text.append(f"{message.text}\n")
    for call in message.tool_calls:
        text.append(f"→ {call.function.name}({call.function.arguments})\n", style="yellow")
