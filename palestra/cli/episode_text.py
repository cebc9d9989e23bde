"""An episode's conversation as plain text, without tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, ImagePart
from palestra.types.records import Trajectory

Show = Callable[[str, str], RenderableType]  # of a picture's digest, and the policy whose model got it


def conversation(trajectory: Trajectory, show: Show) -> Group:
    """Return every call with its new messages and its reply.

    Args:
        show: renders a picture.
    """
    return Group(*_blocks(trajectory, show))


def _blocks(trajectory: Trajectory, show: Show) -> Iterator[RenderableType]:
    """Yield the conversation as blocks, each on its own lines."""
    before: Chat | None = None
    for chat in trajectory.chats:
        title = f"── call {chat.index}, {chat.agent}, step {chat.time_step}"
        if before is not None and chat.parent is not before:
            title += " (from the beginning)" if chat.parent is None else f" (goes on from call {chat.parent.index})"
        yield Text(f"{title} ──", style="dim")
        for message in chat.new_messages:
            yield from _message(message, chat.policy, show)
        if chat.is_raw:
            yield Text("(a prompt of token ids or raw text)", style="dim")
        elif not chat.new_messages and chat.parent is not None:
            yield Text(f"(no new message: call {chat.parent.index} begins with this prompt, too)", style="dim")
        yield from _message(chat.reply, chat.policy, show, "cut at its limit" if chat.finish_reason == "length" else "")
        before = chat
    if not trajectory.chats:
        yield Text("no calls", style="dim")
    rewards = trajectory.episode.rewards
    yield Text("no reward" if rewards is None else f"reward {trajectory.episode.reward:g}", style="bold")
    for name, value in sorted((trajectory.episode.named_rewards or {}).items()):
        yield Text(f"{name}: {'not scored' if value is None else f'{value:g}'}", style="bold")


def _message(message: ChatMessage, policy: str, show: Show, note: str = "") -> Iterator[RenderableType]:
    """Yield the role of a message, then its texts and pictures in order."""
    name = f" {message.name}" if message.name else ""
    yield Text(f"[{message.role}{name}]{f' ({note})' if note else ''}", style="bold cyan")
    if message.reasoning_content:
        yield Text(f"(thought) {message.reasoning_content}", style="dim")
    text = ""
    for part in message.content:
        if not isinstance(part, ImagePart):
            text += part.text
            continue
        if text:
            yield Text(text)
        yield show(part.digest, policy)
        text = ""
    if text:
        yield Text(text)
    for call in message.tool_calls:
        yield Text(f"→ {call.function.name}({call.function.arguments})", style="yellow")
