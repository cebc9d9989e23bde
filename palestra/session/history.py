"""An episode's conversations: finds the earlier call that messages continue, or where they deviate from it."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_

from palestra.renderers.probes import Unseen
from palestra.session.arguments import arguments_key
from palestra.tokens import TokenTrie
from palestra.types.calls import Chat, ForkReason, TokenSequence
from palestra.types.messages import ChatMessage, FunctionCall, TextPart, ToolCall

_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_SPACED_TAG = re.compile(r"\s*(</?think>)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sameness:
    """Changes of a reply that are ignored when an agent sends it back.

    Attributes:
        whitespace: allow other whitespace around text and reasoning.
    """

    reasoning: bool = False
    whitespace: bool = False


EXACT = Sameness()


class _HistoryNode:
    """A message in the tree of conversations; its parent is the previous message.

    Attributes:
        parent: None: the root.
        message: None: the root.
        depth: number of messages up to this one.
        without_reasoning: children that may come back without their reasoning, by key without it.
        calls: calls whose reply this message is.
    """

    __slots__ = ("calls", "children", "depth", "message", "parent", "without_reasoning")

    def __init__(self, parent: _HistoryNode | None, message: ChatMessage | None) -> None:
        self.parent = parent
        self.message = message
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Hashable, _HistoryNode] = {}
        self.without_reasoning: dict[Hashable, list[_HistoryNode]] = {}
        self.calls: list[Chat] = []

    def followed_by(self, key: Hashable) -> list[_HistoryNode]:
        """Return the next messages that match this key."""
        exact = self.children.get(key)
        return [*(() if exact is None else (exact,)), *self.without_reasoning.get(key, ())]


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a conversation that an episode's earlier calls contain.

    Attributes:
        call: the call whose messages and reply are the longest prefix of the conversation; None: no call's are.
        known: length of the longest prefix that occurs in any call.
        left: the call from which the conversation deviates after `known` messages; None: no deviation.
        reason: of the deviation; None: it continues or repeats a call.
    """

    call: Chat | None
    messages: int
    known: int
    left: Chat | None = None
    reason: ForkReason | None = None


class CallHistory:
    """A policy's conversations as a tree of messages; equal messages share a node."""

    def __init__(self, sameness: Sameness = EXACT, unseen: Unseen = frozenset()) -> None:
        """Create an empty history. `unseen` are the parts of messages that the policy's template leaves out."""
        self._sameness, self._unseen = sameness, unseen
        self._compared = Sameness(whitespace=sameness.whitespace)  # by which keys are made
        self._start = _HistoryNode(None, None)
        self._ends: dict[int, _HistoryNode] = {}  # the node of a call's reply, by the call's index
        self._replies: dict[Hashable, list[Chat]] = {}  # by key
        self._newest: Chat | None = None
        self._said: tuple[ChatMessage, ...] = ()  # the newest call's messages and reply

    def add(self, chat: Chat, keys: Mapping[int, Hashable] | None = None) -> None:
        """Add a call after its parent; a call without messages is ignored. `keys` are those known of its messages, by
        `id`; see `keys`.
        """
        if chat.is_raw:
            self._ends[chat.index] = self._start
            return
        node, messages = self._start, chat.new_messages
        if chat.parent is not None and chat.parent.index in self._ends:
            node = self._ends[chat.parent.index]
            while node.parent is not None and node.depth > chat.shared_messages:
                node = node.parent
        elif chat.shared_messages:
            messages = chat.messages
        known = keys or {}
        for message in (*messages, chat.reply):
            key = known.get(id(message))
            if key is None:
                key = message_key(message, self._compared, self._unseen)
            bare = self._bare_key(message) if self._sameness.reasoning else None
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _HistoryNode(node, message)
                if bare not in (None, key):
                    node.without_reasoning.setdefault(bare, []).append(child)
            node = child
        node.calls.append(chat)
        self._ends[chat.index] = node
        earlier = self._said if chat.parent is self._newest or not chat.shared_messages else chat.messages
        self._newest = chat
        self._said = (*earlier[: chat.shared_messages], *chat.new_messages, chat.reply)
        self._replies.setdefault(key, []).append(chat)
        if bare not in (None, key):
            self._replies.setdefault(bare, []).append(chat)

    def clear(self) -> None:
        """Remove all calls, and cut cycles between nodes, which would wait for the garbage collector."""
        stack = [self._start]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children.clear()
            node.without_reasoning.clear()
        self._ends.clear()
        self._replies.clear()
        self._newest, self._said = None, ()

    def same(self, messages: Sequence[ChatMessage]) -> int:
        """Return the number of leading messages that are the same objects as the newest call's messages and reply; 0
        unless all of those match.

        An agent in this process continues its newest call with the same objects, so they need no comparison.
        """
        said = self._said
        return len(said) if len(messages) > len(said) and all(map(is_, said, messages)) else 0

    def keys(self, messages: Sequence[ChatMessage]) -> dict[int, Hashable]:
        """Return keys of messages by `id`, valid while the messages exist. Thread-safe."""
        found = {}
        for message in messages:
            key = found[id(message)] = message_key(message, self._compared, self._unseen)
            hash(key)  # strings keep their hash, so that it is not computed where the key is used
        return found

    def match(
        self, messages: Sequence[ChatMessage], keys: dict[int, Hashable] | None = None, same: int | None = None
    ) -> Match:
        """Find the longest call that these messages continue, and where they deviate from earlier ones.

        `keys` are of messages, and those that `same` does not cover are added; `same` is what the method of this name
        returned for them, and None: it is called here.
        """
        # A message without reasoning may stand for several replies, so there may be several places in the tree.
        nodes, replied, ends, known = [self._start], list[Chat](), 0, 0
        if same is None:
            same = self.same(messages)
        if same and self._newest is not None:
            nodes = [self._ends[self._newest.index]]
            replied, ends, known = nodes[0].calls, same, same
        found = {} if keys is None else keys
        for message in messages[known:]:
            if id(message) not in found:
                found[id(message)] = message_key(message, self._compared, self._unseen)
        for message in messages[known:]:
            key = found[id(message)]
            if len(nodes) == 1 and not nodes[0].without_reasoning:
                only = nodes[0].children.get(key)
                if only is None:
                    break
                nodes, calls = [only], only.calls
            else:
                following = [child for node in nodes for child in node.followed_by(key)]
                if not following:
                    break
                nodes, calls = following, [call for node in following for call in node.calls]
            known += 1
            if calls and known < len(messages):
                replied, ends = calls, known
        # Several calls may have the same text in other ids. Arrival order is not deterministic, so the seed decides.
        call = min(replied, key=lambda chat: chat.sampling.seed, default=None)
        rest = messages[known:]
        if not rest:
            return Match(call, ends, known)
        others = [child for node in nodes for child in node.children.values()]
        if not others or (known and known == ends and not self._has_reply(rest)):
            return Match(call, ends, known)
        left, reason = self._left(others, rest)
        return Match(call, ends, known, left, reason)

    def _key(self, message: ChatMessage) -> Hashable:
        """Return the key for comparing a message in this history."""
        return message_key(message, self._compared, self._unseen)

    def _bare_key(self, message: ChatMessage) -> Hashable:
        """Return the message's key without its reasoning; None: it must come back with it."""
        if not self._sameness.reasoning or message.role != "assistant":
            return None
        return message_key(message, self._sameness, self._unseen)

    def _has_reply(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether one of the messages is a reply of an earlier call of the policy."""
        # What another policy said is text to this one: a judge that is shown it has lost none of its own tokens.
        return any(message.role == "assistant" and self._key(message) in self._replies for message in messages)

    def _left(self, others: Sequence[_HistoryNode], rest: Sequence[ChatMessage]) -> tuple[Chat | None, ForkReason]:
        """Return the call from which a conversation deviates, and the reason."""
        if rest[0].role == "assistant":
            for other in others:
                if other.message is not None and (reason := self._rewritten(rest[0], other.message)):
                    return _latest(other), reason
        if self._has_reply(rest):
            shown = any(other.message and self._same_but_pictures(rest[0], other.message) for other in others)
            reason = ForkReason.PICTURE_CHANGED if shown else ForkReason.EDITED_MESSAGE
            return self._keeper(others, rest) or _latest(others[-1]), reason
        if rest[0].role == "assistant" and any(o.message and o.message.role == "assistant" for o in others):
            return _latest(others[-1]), ForkReason.EDITED_MESSAGE
        return (_latest(others[-1]) if others[-1].depth > 1 else None), ForkReason.NEW_CONVERSATION

    def _rewritten(self, now: ChatMessage, before: ChatMessage) -> ForkReason | None:
        """Return why an assistant's message differs from an earlier one; None: agents do not usually change it so."""
        if before.role != "assistant":
            return None
        bare = Sameness(reasoning=True, whitespace=True)
        key = message_key(now, Sameness(whitespace=True), self._unseen)
        without = message_key(before, bare, self._unseen)
        if key == message_key(before, Sameness(whitespace=True), self._unseen) or (
            self._sameness.reasoning and key == without
        ):
            return ForkReason.WHITESPACE_STRIPPED
        if key == without:
            return ForkReason.REASONING_STRIPPED
        if now.tool_calls and self._key(_without_arguments(now)) in (
            self._key(_without_arguments(before)),
            self._bare_key(_without_arguments(before)),
        ):
            return ForkReason.TOOL_ARGUMENTS
        return None

    def _same_but_pictures(self, one: ChatMessage, other: ChatMessage) -> bool:
        """Return whether two messages that the model does not read alike differ in their pictures alone."""

        def texts(message: ChatMessage) -> Hashable:
            content = tuple(part for part in message.content if isinstance(part, TextPart))
            return self._key(message.model_copy(update={"content": content}))

        has_pictures = any(not isinstance(part, TextPart) for part in (*one.content, *other.content))
        return has_pictures and texts(one) == texts(other)

    def _keeper(self, others: Sequence[_HistoryNode], rest: Sequence[ChatMessage]) -> Chat | None:
        """Return the last call that went on with one of `others` and whose reply is the last one in `rest`, or None."""
        for message in reversed(rest):
            if message.role == "assistant":
                for chat in reversed(self._replies.get(self._key(message), ())):
                    end: _HistoryNode | None = self._ends[chat.index]
                    while end is not None and end.depth > others[0].depth:
                        end = end.parent
                    if end in others:
                        return chat
        return None


class EarlierCalls:
    """Calls of a policy that later ones may continue: of one player slot, or of all agents without one.

    Ids of two tokenizers may be equal by chance, so a call is compared with those of its own policy only.

    Attributes:
        policy, seat: as digests of prompts name them; the default policy is "".
        unmerged: calls that are not yet in the trie, which most episodes never need.
        prompts: first calls, by the digest of a prompt that was rendered whole.
    """

    def __init__(self, policy: str, seat: str, history: CallHistory) -> None:
        self.policy, self.seat, self.history = policy, seat, history
        self.unmerged: list[Chat] = []
        self.prompts: dict[bytes, Chat] = {}
        self._trie: TokenTrie | None = None

    def trie(self) -> TokenTrie:
        """Return all calls merged by tokens, after adding new ones."""
        if self._trie is None:
            self._trie = TokenTrie()
        while self.unmerged:
            self._trie.add(self.unmerged.pop())
        return self._trie

    def longest(self, prompt: TokenSequence, digest: bytes) -> tuple[Chat | None, int]:
        """Return the first call that shares most leading tokens with a prompt, and how many it shares. An equal prompt
        without images is found by `digest`, without a trie.
        """
        equal = None if prompt.media else self.prompts.get(digest)
        if equal is None:
            return self.trie().longest(*prompt)
        size = len(prompt.ids)
        while equal.parent is not None and equal.shared >= size:
            equal = equal.parent
        return equal, size

    def clear(self) -> None:
        """Forget all calls and free their memory."""
        self.unmerged.clear()
        self.prompts.clear()
        if self._trie is not None:
            self._trie.clear()
        self.history.clear()


def _latest(node: _HistoryNode) -> Chat:
    """Return the last call that contains this message. A node without children is always a reply."""
    while node.children:
        node = next(reversed(node.children.values()))
    return node.calls[-1]


def message_key(message: ChatMessage, sameness: Sameness = EXACT, unseen: Unseen = frozenset()) -> Hashable:
    """Return a key that is equal for messages that the model reads the same way.

    Ids of tool calls, formatting of arguments (`arguments_key`) and parts that the model is not shown (`unseen`) are
    ignored; so are changes of an assistant's message that `sameness` allows.
    """
    role = message.role
    name = None if (role, "name") in unseen else message.name
    answered = None if (role, "tool_call_id") in unseen else message.tool_call_id
    content = message.content
    text = content[0].text if len(content) == 1 and isinstance(content[0], TextPart) else _parts(message)
    thought = message.reasoning_content or None
    if role == "assistant" and sameness != EXACT:
        text, thought = _without(text, thought, sameness)
    if thought is None and not message.tool_calls and name is None:
        return (role, text, answered)
    calls = tuple(map(_call_key, message.tool_calls))
    return (role, text, answered, name, thought, calls)


def _without(text: Hashable, thought: str | None, sameness: Sameness) -> tuple[Hashable, str | None]:
    """Return a reply's text and reasoning without the parts that `sameness` ignores."""
    if sameness.reasoning:
        thought = None
        text = _THOUGHT.sub("", text) if isinstance(text, str) else text
    if sameness.whitespace:
        thought = None if thought is None else thought.strip() or None
        text = _SPACED_TAG.sub(r"\1", text.strip()) if isinstance(text, str) else text
    return text, thought


def _parts(message: ChatMessage) -> Hashable:
    """Return the content of a message with several parts as a key: text, or text and digests of images."""
    if all(isinstance(part, TextPart) for part in message.content):
        return message.text
    return tuple(part.text if isinstance(part, TextPart) else (part.type, part.digest) for part in message.content)


def _without_arguments(message: ChatMessage) -> ChatMessage:
    calls = [
        call.model_copy(update={"function": FunctionCall(name=call.function.name, arguments="{}")})
        for call in message.tool_calls
    ]
    return message.model_copy(update={"tool_calls": tuple(calls)})


def _call_key(call: ToolCall) -> Hashable:
    """Return the name and the arguments of a tool call as a key."""
    return (call.function.name, arguments_key(call.function.arguments))
