"""From an agent's messages to the exact ids of a prompt, and what became of the episode's earlier ids on the way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from palestra.chat import Renderer, bridge, render
from palestra.errors import HistoryDrift
from palestra.schemas.forks import Fork, ForkReason
from palestra.schemas.messages import ChatMessage
from palestra.schemas.records import Chat, Ids
from palestra.session.context import PolicyRuntime, SessionContext
from palestra.session.history import History, Match, Sameness, is_raw
from palestra.threads import WorkPool
from palestra.trajectory import TokenTrie, common_prefix, starts_with

LONG_TEXT = 8_000  # characters, or as much work as so many, from which it leaves the event loop
_VALUE = 40  # characters that take as long to render as one message, one call or one value of a tool takes beside them
MANY_TOKENS = 4096  # of which decoding takes longer than handing them to a thread

T = TypeVar("T")
Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The prompt of a call, as its record will hold it."""

    ids: Ids  # [P]
    parent: Chat | None
    shared: int  # leading ids that are the parent's
    shared_messages: int
    new_messages: tuple[ChatMessage, ...]
    fork: Fork | None
    keys: Mapping[int, Hashable] = field(default_factory=dict, compare=False)  # see `History.add`

    @property
    def tail(self) -> Ids:
        """[P - shared], a copy: a view would keep the whole prompt alive for as long as the call is."""
        return self.ids[self.shared :].copy()


class Prompts:
    """The calls of an episode as far as they decide the next prompt: what was said, and in which ids."""

    def __init__(self, sameness: Sameness) -> None:
        """See `History` for `sameness`."""
        self.calls = 0
        self._trie = TokenTrie()
        self._unmerged: list[Chat] = []  # calls that are not in it: most episodes never ask
        self._history = History(sameness)

    @property
    def trie(self) -> TokenTrie:
        """All calls, merged on their tokens."""
        while self._unmerged:
            self._trie.add(self._unmerged.pop())
        return self._trie

    def add(self, chat: Chat, keys: Mapping[int, Hashable] | None = None) -> None:
        """A call that is on disk. `keys`: of its prompt, see `History.add`."""
        self.calls += 1
        self._unmerged.append(chat)
        self._history.add(chat, keys)

    def clear(self) -> None:
        """The episode is over."""
        self._unmerged.clear()
        self._trie.clear()
        self._history.clear()

    async def make(
        self,
        context: SessionContext,
        runtime: PolicyRuntime,
        policy: str,
        messages: tuple[ChatMessage, ...],
        tools: Tools,
        room: int | None,
    ) -> Prompt:
        """The prompt of a call.

        If the messages go on from an earlier call (from the longest, if from several), the prompt starts with the
        exact ids of that call, sampled ones included, and the renderer adds what is new. Otherwise all is rendered,
        and the earlier call with which most leading ids are in common becomes the parent. Work that grows with the
        messages or the tools is done in threads of the context's pool.

        Raises:
            HistoryDrift: histories are strict, and exact ids would be lost.
            TooManyTokens: there are more than `room`; found before all is tokenised.
        """
        aside = _Aside(context.pool)
        new = messages[self._history.same(policy, messages) :]
        keys = await aside.run(new, (), self._history.keys, new)
        match = self._history.match(policy, messages, keys)
        prompt = await self._bridged(aside, runtime.renderer, match, messages, tools, room)
        if prompt is None:
            prompt = await self._rendered(aside, runtime, match, messages, tools, room)
        if context.strict_history and prompt.fork is not None and prompt.fork.reason.is_drift:
            fork = prompt.fork
            raise HistoryDrift(fork.reason.value, fork.call, fork.message, fork.position)
        return replace(prompt, keys=keys)

    def raw(self, ids: Ids) -> Prompt:
        """The prompt of a call that has ids instead of messages; it goes on from the call it starts with."""
        parent, shared = self.trie.longest(ids)
        return Prompt(ids=ids, parent=parent, shared=shared, shared_messages=0, new_messages=(), fork=None)

    async def _bridged(
        self,
        aside: _Aside,
        renderer: Renderer,
        match: Match,
        messages: tuple[ChatMessage, ...],
        tools: Tools,
        room: int | None,
    ) -> Prompt | None:
        call = match.call
        if call is None or call.tools != tools:
            return None
        new = messages[match.messages :]
        room = None if room is None or not _is_long(new, ()) else max(room - call.tokens, 0)
        # of the tools nothing is written again
        tail = await aside.run(
            new, (), bridge, renderer, lambda: call.prompt_ids, call.completion_ids, new, tools, room
        )
        if tail is None:
            return None
        ids = np.concatenate((call.ids, tail)).astype(np.int32, copy=False)
        fork = None if match.reason is None else _fork(match.reason, match.left, match.known, ids)
        return Prompt(
            ids=ids, parent=call, shared=call.tokens, shared_messages=match.messages, new_messages=new, fork=fork
        )

    async def _rendered(
        self,
        aside: _Aside,
        runtime: PolicyRuntime,
        match: Match,
        messages: tuple[ChatMessage, ...],
        tools: Tools,
        room: int | None,
    ) -> Prompt:
        # A short prompt is tokenised whole: the answer to one that does not fit has the exact number of its tokens.
        room = room if _is_long(messages, tools) else None
        ids: Ids = await aside.run(messages, tools, render, runtime.renderer, messages, tools, room)
        exact = match.call is not None and starts_with(ids, match.call.ids)
        parent, shared = (match.call, match.call.tokens) if match.call and exact else self.trie.longest(ids)
        fork = None
        if match.reason is not None:
            fork = _fork(match.reason, match.left, match.known, ids)
        elif match.call is not None and not exact:
            fork = await aside.run_if(len(ids) > MANY_TOKENS, _drift, match.call, ids, tools, runtime.decode)
        said = () if parent is None or is_raw(parent) else (*parent.messages, parent.reply)
        shared_messages = await aside.run(said, (), _common_messages, messages, said)
        return Prompt(
            ids=ids,
            parent=parent,
            shared=shared,
            shared_messages=shared_messages,
            new_messages=messages[shared_messages:],
            fork=fork,
        )


class _Aside:
    """Does work on the event loop where there is little of it, and else in a thread."""

    def __init__(self, pool: WorkPool) -> None:
        self._pool = pool

    async def run(
        self, messages: Sequence[ChatMessage], tools: Tools, function: Callable[..., T], *arguments: Any
    ) -> T:
        """Call `function`, of which the work grows with these messages and tools."""
        return await self.run_if(_is_long(messages, tools), function, *arguments)

    async def run_if(self, long: bool, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function`, in a thread if `long`."""
        return await self._pool.run(function, *arguments) if long else function(*arguments)


def _is_long(messages: Sequence[ChatMessage], tools: Tools) -> bool:
    """Whether there is more than `LONG_TEXT` in all of these; looks no further than that."""
    left = LONG_TEXT
    for message in messages:
        left -= _VALUE + len(message.text) + len(message.reasoning_content or "")
        for call in message.tool_calls:
            left -= _VALUE + len(call.function.name) + len(call.function.arguments)
            if left < 0:
                return True
        if left < 0:
            return True
    values: list[Any] = list(tools[: LONG_TEXT // _VALUE + 1])
    while values and left >= 0:
        value = values.pop()
        left -= _VALUE + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
    return left < 0


def _fork(reason: ForkReason, left: Chat | None, message: int, ids: Ids) -> Fork:
    return Fork(
        reason=reason,
        call=None if left is None else left.index,
        message=message,
        position=0 if left is None else common_prefix(ids, left.ids),
    )


def _drift(call: Chat, ids: Ids, tools: Tools, decode: Callable[[Sequence[int]], str]) -> Fork:
    """The messages go on from `call`, but rendered anew they do not start with its ids: what the renderer changed."""
    position = common_prefix(ids, call.ids)
    owner = next(chat for chat, end in reversed(list(call.lineage())) if position < end)
    in_reply = position >= owner.prompt_tokens
    before = owner if in_reply else owner.parent  # whose turn is written in another way
    if call.tools != tools:
        reason = ForkReason.TOOLS_CHANGED
    elif decode(ids.tolist()).startswith(decode(call.ids.tolist())):
        reason = ForkReason.TOKENIZATION
    elif before is not None and before.finish_reason == "length":
        reason = ForkReason.TRUNCATED_TURN
    elif in_reply and (thought := _thought(owner.reply)) and thought not in decode(ids[owner.prompt_tokens :].tolist()):
        reason = ForkReason.REASONING_STRIPPED
    elif in_reply and owner.reply.tool_calls:
        reason = ForkReason.TOOL_ARGUMENTS
    else:
        reason = ForkReason.TEMPLATE
    message = len(owner.messages) if in_reply else owner.shared_messages
    return Fork(reason=reason, call=call.index, message=message, position=position)


def _thought(reply: ChatMessage) -> str:
    # Templates write reasoning without the white space around it; that alone drops nothing.
    return (reply.reasoning_content or reply.text.rpartition("</think>")[0]).strip()


def _common_messages(a: Sequence[ChatMessage], b: Sequence[ChatMessage]) -> int:
    common = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine is not theirs and mine != theirs:
            break
        common += 1
    return common
