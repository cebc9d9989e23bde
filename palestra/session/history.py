"""An episode's conversations: finds the earlier call that messages continue, or where they deviate from it.

Arguments of tool calls are compared by value, because agents serialize JSON differently.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NoReturn

import orjson

from palestra.renderers.probes import Unseen
from palestra.types.calls import Chat, ForkReason
from palestra.types.messages import ChatMessage, FunctionCall, TextPart, ToolCall

_EXACT = range(-(2**63), 2**64)  # integers that orjson reads exactly; it turns all others into floats
_LONGEST = 20  # number of digits of the longest of them


_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_SPACED_TAG = re.compile(r"\s*(</?think>)\s*")


class _Number(str):
    """The exact value of a number outside 64-bit integers, as text. Its `repr` differs from every JSON string's."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def arguments_key(text: str) -> Hashable:
    """Return a key that is equal for two JSON texts of the same value.

    Key order, whitespace and escapes do not matter; of duplicate keys the last counts. Numbers are compared by exact
    decimal value: `1`, `1.0` and `10e-1` are equal, but any two different numbers differ, even if they are equal as
    64-bit floats. Text that is not JSON (`NaN`, a truncated object) equals only itself.
    """
    try:
        value = orjson.loads(text)
        if not _has_float(value):
            return _sorted(value)
    except orjson.JSONDecodeError:  # perhaps only because a number is too large for a float
        pass
    try:
        return _exact_key(text)
    except (ValueError, TypeError, RecursionError):  # not JSON, or half a surrogate pair, or nested too deep
        return text


def _exact_key(text: str) -> Hashable:
    """Return the key of a text with numbers that a float may round."""
    beyond: list[_Number] = []

    def number(written: str) -> int | _Number:
        read = _decimal(written)
        if isinstance(read, _Number):
            beyond.append(read)
        return read

    value = _decoder(number).decode(text)
    # Without such a number the text may still contain 1.0, which needs the same key as 1.
    return (True, repr(value)) if beyond else _sorted(value)


def _decoder(number: Callable[[str], int | _Number]) -> json.JSONDecoder:
    """Return a JSON decoder that reads numbers with `number`, refuses NaN and sorts keys."""
    return json.JSONDecoder(
        parse_int=number,
        parse_float=number,
        parse_constant=_refuse,
        object_pairs_hook=lambda pairs: dict(sorted(dict(pairs).items())),
    )


def _refuse(constant: str) -> NoReturn:
    """Raise an error for NaN and infinities, which Python's decoder would accept."""
    raise ValueError(f"{constant} is not JSON")


def _sorted(value: Any) -> bytes:
    """Return a value as compact JSON with sorted keys, for comparison."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _has_float(value: Any) -> bool:
    """Return whether a value contains a float, which the decoder may have rounded."""
    values = [value]
    while values:
        value = values.pop()
        if type(value) is dict:
            values.extend(value.values())
        elif type(value) is list:
            values.extend(value)
        elif type(value) is float:
            return True
    return False


def _decimal(written: str) -> int | _Number:
    """Return the exact value of a JSON number: an integer if orjson can read it, else digits and a power of ten."""
    mantissa, _, exponent = written.lower().removeprefix("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return 0
    if len(exponent) > _LONGEST:  # Python refuses to read integers of thousands of digits
        return _Number(written.lower())
    significant = digits.rstrip("0")
    power = int(exponent or 0) - len(fraction) + len(digits) - len(significant)
    sign = "-" if written[0] == "-" else ""
    if 0 <= power <= _LONGEST - len(significant) and (integer := int(sign + significant + "0" * power)) in _EXACT:
        return integer
    return _Number(f"{sign}{significant}e{power}")


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
    """An episode's conversations as a tree of messages; equal messages share a node."""

    def __init__(self, sameness: Sameness = EXACT, unseen: Callable[[str], Unseen] = lambda _: frozenset()) -> None:
        """Create an empty history. `unseen` returns the parts of messages that a policy's template leaves out."""
        self._sameness, self._unseen = sameness, unseen
        self._compared = Sameness(whitespace=sameness.whitespace)  # by which keys are made
        self._starts: defaultdict[str, _HistoryNode] = defaultdict(lambda: _HistoryNode(None, None))  # by policy
        self._ends: dict[int, _HistoryNode] = {}  # the node of a call's reply, by the call's index
        self._replies: dict[tuple[str, Hashable], list[Chat]] = {}  # by policy and key
        self._newest: dict[str, tuple[Chat, tuple[ChatMessage, ...]]] = {}  # of each policy, with messages and reply

    def add(self, chat: Chat, keys: Mapping[int, Hashable] | None = None) -> None:
        """Add a call after its parent; a call without messages is ignored. `keys` are those known of its messages, by
        `id`; see `keys`.
        """
        if chat.is_raw:
            self._ends[chat.index] = self._starts[chat.policy]
            return
        node, messages = self._starts[chat.policy], chat.new_messages
        if chat.parent is not None and chat.parent.policy == chat.policy:
            node = self._ends[chat.parent.index]
            while node.parent is not None and node.depth > chat.shared_messages:
                node = node.parent
        elif chat.shared_messages:
            messages = chat.messages
        known = keys or {}
        bares = self._sameness.reasoning
        for message in (*messages, chat.reply):
            key = known[id(message)] if id(message) in known else self._key(chat.policy, message)
            bare = self._bare_key(chat.policy, message) if bares else None
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _HistoryNode(node, message)
                if bare not in (None, key):
                    node.without_reasoning.setdefault(bare, []).append(child)
            node = child
        node.calls.append(chat)
        self._ends[chat.index] = node
        before, said = self._newest.get(chat.policy, (None, ()))
        earlier = said if chat.parent is before or not chat.shared_messages else chat.messages
        self._newest[chat.policy] = chat, (*earlier[: chat.shared_messages], *chat.new_messages, chat.reply)
        self._replies.setdefault((chat.policy, key), []).append(chat)
        if bare not in (None, key):
            self._replies.setdefault((chat.policy, bare), []).append(chat)

    def clear(self) -> None:
        """Remove all calls, and cut cycles between nodes, which would wait for the garbage collector."""
        stack = list(self._starts.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children.clear()
            node.without_reasoning.clear()
        self._starts.clear()
        self._ends.clear()
        self._replies.clear()
        self._newest.clear()

    def same(self, policy: str, messages: Sequence[ChatMessage]) -> int:
        """Return the number of leading messages that are the same objects as the newest call's messages and reply; 0
        unless all of those match.

        An agent in this process continues its newest call with the same objects, so they need no comparison.
        """
        newest, said = self._newest.get(policy, (None, ()))
        goes_on = newest is not None and len(messages) > len(said) and all(map(is_, said, messages))
        return len(said) if goes_on else 0

    def keys(self, policy: str, messages: Sequence[ChatMessage]) -> dict[int, Hashable]:
        """Return a policy's keys of messages by `id`, valid while the messages exist. Thread-safe."""
        found, unseen = {}, self._unseen(policy)
        for message in messages:
            key = found[id(message)] = message_key(message, self._compared, unseen)
            hash(key)  # strings keep their hash, so that it is not computed where the key is used
        return found

    def match(
        self,
        policy: str,
        messages: Sequence[ChatMessage],
        keys: dict[int, Hashable] | None = None,
        same: int | None = None,
    ) -> Match:
        """Find the longest call of the policy that these messages continue, and where they deviate from earlier ones.

        `keys` are of messages, and those that `same` does not cover are added; `same` is what the method of this name
        returned for them, and None: it is called here.
        """
        # A message without reasoning may stand for several replies, so there may be several places in the tree.
        nodes, replied, ends, known = [self._starts[policy]], list[Chat](), 0, 0
        if same is None:
            same = self.same(policy, messages)
        if same:
            nodes = [self._ends[self._newest[policy][0].index]]
            replied, ends, known = nodes[0].calls, same, same
        found = {} if keys is None else keys
        unseen = self._unseen(policy)
        for message in messages[known:]:
            if id(message) not in found:
                found[id(message)] = message_key(message, self._compared, unseen)
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
        if not others or (known and known == ends and not self._has_reply(policy, rest)):
            return Match(call, ends, known)
        left, reason = self._left(policy, others, rest)
        return Match(call, ends, known, left, reason)

    def _key(self, policy: str, message: ChatMessage) -> Hashable:
        """Return the key for comparing a policy's message in this episode."""
        return message_key(message, self._compared, self._unseen(policy))

    def _bare_key(self, policy: str, message: ChatMessage) -> Hashable:
        """Return the message's key without its reasoning; None: it must come back with it."""
        if not self._sameness.reasoning or message.role != "assistant":
            return None
        return message_key(message, self._sameness, self._unseen(policy))

    def _has_reply(self, policy: str, messages: Sequence[ChatMessage]) -> bool:
        """Return whether one of the messages is a reply of an earlier call of the policy."""
        # What another policy said is text to this one: a judge that is shown it has lost none of its own tokens.
        replies = self._replies
        return any(
            message.role == "assistant" and (policy, self._key(policy, message)) in replies for message in messages
        )

    def _left(
        self, policy: str, others: Sequence[_HistoryNode], rest: Sequence[ChatMessage]
    ) -> tuple[Chat | None, ForkReason]:
        """Return the call from which a conversation deviates, and the reason."""
        if rest[0].role == "assistant":
            for other in others:
                if other.message is not None and (reason := self._rewritten(policy, rest[0], other.message)):
                    return _latest(other), reason
        if self._has_reply(policy, rest):
            shown = any(other.message and self._same_but_pictures(policy, rest[0], other.message) for other in others)
            reason = ForkReason.PICTURE_CHANGED if shown else ForkReason.EDITED_MESSAGE
            return self._keeper(policy, others, rest) or _latest(others[-1]), reason
        if rest[0].role == "assistant" and any(o.message and o.message.role == "assistant" for o in others):
            return _latest(others[-1]), ForkReason.EDITED_MESSAGE
        return (_latest(others[-1]) if others[-1].depth > 1 else None), ForkReason.NEW_CONVERSATION

    def _rewritten(self, policy: str, now: ChatMessage, before: ChatMessage) -> ForkReason | None:
        """Return why an assistant's message differs from an earlier one; None: agents do not usually change messages
        this way.
        """
        if before.role != "assistant":
            return None
        unseen, bare = self._unseen(policy), Sameness(reasoning=True, whitespace=True)
        key = message_key(now, Sameness(whitespace=True), unseen)
        without = message_key(before, bare, unseen)
        if key == message_key(before, Sameness(whitespace=True), unseen) or (
            self._sameness.reasoning and key == without
        ):
            return ForkReason.WHITESPACE_STRIPPED
        if key == without:
            return ForkReason.REASONING_STRIPPED
        if now.tool_calls and self._key(policy, _without_arguments(now)) in (
            self._key(policy, _without_arguments(before)),
            self._bare_key(policy, _without_arguments(before)),
        ):
            return ForkReason.TOOL_ARGUMENTS
        return None

    def _same_but_pictures(self, policy: str, one: ChatMessage, other: ChatMessage) -> bool:
        """Return whether two messages that the model does not read alike differ in their pictures alone."""

        def texts(message: ChatMessage) -> Hashable:
            content = tuple(part for part in message.content if isinstance(part, TextPart))
            return self._key(policy, message.model_copy(update={"content": content}))

        has_pictures = any(not isinstance(part, TextPart) for part in (*one.content, *other.content))
        return has_pictures and texts(one) == texts(other)

    def _keeper(self, policy: str, others: Sequence[_HistoryNode], rest: Sequence[ChatMessage]) -> Chat | None:
        """Return the last call of the policy that continued with one of `others` and whose reply is the last one kept
        in `rest`, or None.
        """
        for message in reversed(rest):
            if message.role == "assistant":
                for chat in reversed(self._replies.get((policy, self._key(policy, message)), ())):
                    end: _HistoryNode | None = self._ends[chat.index]
                    while end is not None and end.depth > others[0].depth:
                        end = end.parent
                    if end in others:
                        return chat
        return None


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
