"""An episode's calls drawn as a tree: which call continues which, forks, and their reasons."""

from __future__ import annotations

from collections.abc import Collection

from rich.text import Text
from rich.tree import Tree

from palestra.cli.episode_list import shortened
from palestra.dashboard.fate import continued_calls
from palestra.tokens import TokenTrie
from palestra.types.calls import Chat
from palestra.types.forks import MEANINGS, Fork
from palestra.types.records import Trajectory

_REPLY = 60  # characters of a reply that are shown


def call_tree(trajectory: Trajectory, trie: TokenTrie, left_out: Collection[int] = ()) -> Tree:
    """Draw each call below the call whose prompt and completion its prompt starts with.

    Args:
        left_out: indices of abandoned calls, which are not trained on.
    """
    chats = trajectory.chats
    root = Tree(Text(_totals(chats, trie)), guide_style="dim")
    branches: dict[int, Tree] = {}
    several = len({chat.policy for chat in chats}) > 1
    continued = continued_calls(chats, trie)
    for chat in chats:
        before = continued[chat.index]
        place = root if before is None else branches[before.index]
        branches[chat.index] = place.add(_label(chat, before, chat.index in left_out, chat.policy if several else ""))
    return root


def _totals(chats: Collection[Chat], trie: TokenTrie) -> str:
    sampled = sum(len(chat.completion_ids) for chat in chats)
    seen = sum(chat.tokens for chat in chats)
    drift = sum(chat.fork is not None and chat.fork.reason.is_drift for chat in chats)
    return (
        f"{len(chats)} call{'s' * (len(chats) != 1)}, {len(trie):,} distinct tokens of {seen:,} that the model saw, "
        f"{sampled:,} sampled, {drift} forked from their history"
    )


def _label(chat: Chat, before: Chat | None, abandoned: bool, policy: str) -> Text:
    text = Text(f"call {chat.index}", style="bold")
    text.append(f"  {chat.agent}, step {chat.time_step}{policy and f', {policy}'}", style="cyan")
    text.append(_sizes(chat, before), style="not bold")
    if abandoned:
        text.append("  abandoned, not trained", style="not bold red")
    if chat.fork is not None:
        text.append("\n" + _fork(chat.fork), style="not bold yellow")
    said = " ".join([repr(chat.reply.text)[1:-1], *(f"{c.function.name}(…)" for c in chat.reply.tool_calls)]).strip()
    text.append("\n" + shortened(said, _REPLY), style="not bold dim")
    return text


def _sizes(chat: Chat, before: Chat | None) -> str:
    kept = 0 if before is None else before.tokens
    reused = f"{kept} reused + " if kept else ""
    cut = ", cut at its limit" if chat.finish_reason == "length" else ""
    return f"  {reused}{chat.prompt_tokens - kept} read + {len(chat.completion_ids)} sampled{cut}"


def _fork(fork: Fork) -> str:
    where = "" if fork.call is None else f" (call {fork.call}, message {fork.message}, token {fork.position})"
    return f"⑂ {fork.reason.value.replace('_', ' ')}{where}: {MEANINGS[fork.reason]}"
