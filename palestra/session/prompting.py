"""Turn an agent's messages into the exact ids of a prompt, and find out whether it keeps the ids of earlier calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jinja2 import TemplateError

from palestra.errors import ContextOverflow, HistoryDrift, InvalidRequest, UnsupportedField
from palestra.renderers import Renderer
from palestra.renderers.long_text import TooManyTokens
from palestra.renderers.probes import Unseen
from palestra.session.history import History, Match, Sameness
from palestra.threads import WorkPool
from palestra.tokens import TokenTrie, common_tokens
from palestra.types.calls import Chat, Fork, ForkReason, Ids, MediaSpan, TokenSequence
from palestra.types.messages import ChatMessage, GenerationRequest, TextPart

LONG_TEXT = 8_000  # characters (or as much other work) above which rendering is done in a thread
_VALUE = 40  # a message, tool call or value of a tool costs as much as this many characters, besides its text
MANY_TOKENS = 4096  # decoding more tokens takes longer than handing them to a thread

T = TypeVar("T")
Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The prompt of a call, with everything that the call's record contains about it.

    Attributes:
        ids: int32 [P].
        parent: earlier call with the longest common prefix of ids; None: no call has one.
        shared: length of that prefix.
        shared_messages: leading messages in common with the parent.
        new_messages: the other messages.
        fork: where exact tokens of an earlier call are lost, if any.
        media: images in the ids after `shared`, by position in `ids`.
        keys: of its messages; see `History.add`.
    """

    ids: Ids
    parent: Chat | None
    shared: int
    shared_messages: int
    new_messages: tuple[ChatMessage, ...]
    fork: Fork | None
    media: tuple[MediaSpan, ...] = ()
    keys: Mapping[int, Hashable] = field(default_factory=dict, compare=False)

    @property
    def sequence(self) -> TokenSequence:
        """Return the whole prompt, [P], with all images, including the parent's."""
        before = () if self.parent is None else self.parent.all_media
        if not before:
            return TokenSequence(self.ids, self.media)
        kept = (
            span._replace(tokens=min(span.tokens, self.shared - span.start))
            for span in before
            if span.start < self.shared
        )
        return TokenSequence(self.ids, (*kept, *self.media))

    @property
    def tail(self) -> Ids:
        """Return the ids after the shared prefix, [P - shared], as a copy: a view would keep the whole prompt in
        memory.
        """
        return self.ids[self.shared :].copy()


class PromptBuilder:
    """Builds an episode's prompts from the messages and exact ids of its earlier calls.

    Attributes:
        calls: number of added calls.
    """

    def __init__(
        self,
        pool: WorkPool,
        picture_pool: WorkPool,
        sameness: Sameness,
        strict: bool,
        seat_of: Callable[[str], str] = lambda _: "",
        unseen: Callable[[str], Unseen] = lambda _: frozenset(),
    ) -> None:
        """Create a builder without calls.

        Args:
            pool: threads for rendering.
            picture_pool: threads for prompts with pictures, which may have to be decoded first.
            sameness: changes of a reply that are ignored; see `History`.
            strict: refuse calls that would lose exact tokens of an earlier call.
            unseen: see `Renderer.unseen`.
            seat_of: returns an agent's player slot, or "". Calls of a slot share nothing with others, so that prompts
                do not reveal other players' observations.
        """
        self.calls = 0
        self._pasts: defaultdict[str, _Past] = defaultdict(lambda: _Past(sameness, unseen))  # by seat
        self._aside, self._with_pictures = _Aside(pool), _Aside(picture_pool)
        self._strict, self._seat_of = strict, seat_of

    def trie(self, policy: str, agent: str = "") -> TokenTrie:
        """Return the earlier calls that an agent's call is compared with, merged by tokens.

        Args:
            agent: None: an agent without a player slot.
        """
        return self._past(agent).trie(policy)

    def _past(self, agent: str) -> _Past:
        """Return the calls that an agent may continue: those of its player slot, or of all agents without one."""
        return self._pasts[self._seat_of(agent)]

    def add(self, chat: Chat, keys: Mapping[int, Hashable] | None = None) -> None:
        """Add a call that is on disk, for later prompts.

        Args:
            keys: of its messages, if known; see `History.add`.
        """
        self.calls += 1
        past = self._past(chat.agent)
        past.unmerged.append(chat)
        past.history.add(chat, keys)

    def clear(self) -> None:
        """Remove all calls at the end of the episode."""
        for past in self._pasts.values():
            past.clear()
        self._pasts.clear()

    async def build(self, call: GenerationRequest, renderer: Renderer, max_context: int | None) -> Prompt:
        """Return the prompt of a call.

        If the messages continue an earlier call (the longest, if several), the prompt starts with that call's exact
        ids, including sampled ones, and the renderer adds the new messages. Otherwise the whole conversation is
        rendered, and the call with the longest common prefix of ids becomes the parent.

        Args:
            max_context: tokens of prompt and reply together; None: no limit.

        Raises:
            ContextOverflow: the prompt leaves no tokens for a reply; raised early for long prompts.
            InvalidRequest: the prompt is empty, or the template cannot render the messages.
            HistoryDrift: histories are strict, and exact ids would be lost.
            UnsupportedField: a message has an image, and the model accepts none.
        """
        _refuse_images(call, renderer)
        room = None if max_context is None else max_context - 1
        try:
            if call.prompt is not None:
                prompt = await self._laid_out(call, call.prompt, renderer, room)
            else:
                prompt = await self._of_messages(call, renderer, room)
        except TooManyTokens as error:
            assert max_context is not None
            raise ContextOverflow(error.tokens, max_context, at_least=True) from None
        except (ValueError, KeyError, TemplateError) as error:  # templates refuse messages that they can't show
            text = " ".join(str(error).split())[:200]
            raise InvalidRequest(f"messages: this model's template can't show them: {text}", "messages") from error
        if max_context is not None and len(prompt.ids) >= max_context:
            media = prompt.sequence.media
            pictures = len(media), sum(span.tokens for span in media)
            raise ContextOverflow(len(prompt.ids), max_context, pictures=pictures)
        return prompt

    async def _of_messages(self, call: GenerationRequest, renderer: Renderer, room: int | None) -> Prompt:
        """Build a prompt from messages; see `build`."""
        history = self._past(call.agent).history
        new = call.messages[history.same(call.policy, call.messages) :]
        keys = await self._aside.run(new, (), history.keys, call.policy, new)
        match = history.match(call.policy, call.messages, keys)
        prompt = await self._extended(call, renderer, match, keys, room)
        if prompt is None:
            prompt = await self._rendered(call, renderer, match, keys, room)
        if self._strict and prompt.fork is not None and prompt.fork.reason.is_drift:
            fork = prompt.fork
            raise HistoryDrift(fork.reason.value, fork.call, fork.message, fork.position)
        return prompt

    async def _laid_out(
        self, call: GenerationRequest, prompt: str | tuple[int, ...], renderer: Renderer, room: int | None
    ) -> Prompt:
        """Build a prompt from the caller's text or ids; a call of the policy that is a prefix of it
        becomes its parent.
        """
        vocabulary = renderer.vocabulary
        if isinstance(prompt, str):
            ids: Ids = await self._aside.run_if(len(prompt) > LONG_TEXT, vocabulary.encode, prompt, room)
        elif room is not None and len(prompt) > room:
            raise ContextOverflow(len(prompt), room + 1)
        else:
            ids = np.asarray(prompt, np.int32)
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= len(vocabulary):
            raise InvalidRequest(
                f"prompt: it has no token, or ids that are none; ids are below {len(vocabulary)}", "prompt"
            )
        parent, shared = self.trie(call.policy, call.agent).longest(ids)
        return Prompt(ids=ids, parent=parent, shared=shared, shared_messages=0, new_messages=(), fork=None)

    async def _extended(
        self,
        asked: GenerationRequest,
        renderer: Renderer,
        match: Match,
        keys: Mapping[int, Hashable],
        room: int | None,
    ) -> Prompt | None:
        """Build a prompt that keeps the exact ids of the call that the messages continue."""
        call, tools = match.call, asked.tools
        if call is None or call.tools != tools:
            return None
        new = asked.messages[match.messages :]
        long = _is_long(new, ())  # only the new messages are rendered, so the tools do not count as work
        room = None if room is None or not long else max(room - call.tokens, 0)
        pictures = _has_pictures(new)
        aside = self._with_pictures if pictures else self._aside
        tail = await aside.run_if(
            long or pictures, renderer.extend, lambda: call.prompt_ids, call.completion_ids, new, tools, room
        )
        if tail is None:
            return None
        ids = np.concatenate((call.ids, tail.ids)).astype(np.int32, copy=False)
        media = tuple(span._replace(start=span.start + call.tokens) for span in tail.media)
        whole = TokenSequence(ids, (*call.all_media, *media)) if match.reason is not None else None
        return Prompt(
            ids=ids,
            media=media,
            parent=call,
            shared=call.tokens,
            shared_messages=match.messages,
            new_messages=new,
            fork=None if whole is None or match.reason is None else _fork(match.reason, match.left, match.known, whole),
            keys=keys,
        )

    async def _rendered(
        self,
        call: GenerationRequest,
        renderer: Renderer,
        match: Match,
        keys: Mapping[int, Hashable],
        room: int | None,
    ) -> Prompt:
        """Render the whole conversation, and find out why it does not start with an earlier call, if it should have."""
        messages, tools = call.messages, call.tools
        # A short prompt is tokenised whole, so that the error for one that does not fit has its exact length.
        long = _is_long(messages, tools)
        room = room if long else None
        pictures = _has_pictures(messages)
        aside = self._with_pictures if pictures else self._aside
        whole: TokenSequence = await aside.run_if(long or pictures, renderer.render, messages, tools, room)
        exact = match.call is not None and common_tokens(whole, match.call.sequence) == match.call.tokens
        known = (match.call, match.call.tokens) if match.call and exact else None
        parent, shared = known or self.trie(call.policy, call.agent).longest(*whole)
        fork = None
        left = match.left
        # What differs may be nothing that this template shows.
        same_text = left is not None and common_tokens(whole, left.sequence) == left.tokens
        if match.reason is not None and not same_text:
            fork = _fork(match.reason, left, match.known, whole)
        elif match.call is not None and not exact:
            decode = renderer.vocabulary.decode
            fork = await self._aside.run_if(len(whole.ids) > MANY_TOKENS, _drift, match.call, whole, tools, decode)
        said = () if parent is None or parent.is_raw else (*parent.messages, parent.reply)
        shared_messages = await self._aside.run(said, (), _common_messages, messages, said)
        return Prompt(
            ids=whole.ids,
            media=_from(whole.media, shared),
            parent=parent,
            shared=shared,
            shared_messages=shared_messages,
            new_messages=messages[shared_messages:],
            fork=fork,
            keys=keys,
        )


class _Past:
    """Calls that later ones may continue: of one player slot, or of all agents without one."""

    def __init__(self, sameness: Sameness, unseen: Callable[[str], Unseen]) -> None:
        # Ids of two tokenizers may be equal by chance, so a call is compared with those of its own policy only.
        self._tries: defaultdict[str, TokenTrie] = defaultdict(TokenTrie)
        self.unmerged: list[Chat] = []  # not yet in a trie, which most episodes never need
        self.history = History(sameness, unseen)

    def trie(self, policy: str) -> TokenTrie:
        """Return all calls of a policy merged by tokens, after adding new ones."""
        while self.unmerged:
            chat = self.unmerged.pop()
            self._tries[chat.policy].add(chat)
        return self._tries[policy]

    def clear(self) -> None:
        """Forget all calls and free their memory."""
        self.unmerged.clear()
        for trie in self._tries.values():
            trie.clear()
        self._tries.clear()
        self.history.clear()


class _Aside:
    """Does work on the event loop if there is little of it, else in a thread."""

    def __init__(self, pool: WorkPool) -> None:
        self._pool = pool

    async def run(
        self, messages: Sequence[ChatMessage], tools: Tools, function: Callable[..., T], *arguments: Any
    ) -> T:
        """Call `function`, in a thread if these messages and tools are long."""
        return await self.run_if(_is_long(messages, tools), function, *arguments)

    async def run_if(self, long: bool, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` with `arguments`, in a thread if `long`."""
        return await self._pool.run(function, *arguments) if long else function(*arguments)


def _refuse_images(call: GenerationRequest, renderer: Renderer) -> None:
    """Raise UnsupportedField for images if the model accepts none, because dropping them would change the prompt."""
    if renderer.takes_images:
        return
    for number, message in enumerate(call.messages):
        for k, part in enumerate(message.content):
            if type(part) is not TextPart:
                place = f"messages.{number}.content.{k}"
                raise UnsupportedField(
                    f"{place}: the model of the policy {call.policy!r} takes no images; leave the picture out", place
                )


def _has_pictures(messages: Sequence[ChatMessage]) -> bool:
    """Return whether a message has a picture, which may have to be decoded before its size is known."""
    return any(not isinstance(part, TextPart) for message in messages for part in message.content)


def _is_long(messages: Sequence[ChatMessage], tools: Tools) -> bool:
    """Return whether messages and tools have more than `LONG_TEXT` characters together; stops counting there."""
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


def _from(media: Sequence[MediaSpan], start: int) -> tuple[MediaSpan, ...]:
    """Return the images behind the first `start` tokens; one that crosses that position is cut."""
    behind = (span for span in media if span.start + span.tokens > start)
    return tuple(
        MediaSpan(max(span.start, start), span.start + span.tokens - max(span.start, start), span.digest)
        for span in behind
    )


def _fork(reason: ForkReason, left: Chat | None, message: int, prompt: TokenSequence) -> Fork:
    """Return the record of where a prompt leaves the ids of the call `left`."""
    return Fork(
        reason=reason,
        call=None if left is None else left.index,
        message=message,
        position=0 if left is None else common_tokens(prompt, left.sequence),
    )


def _drift(call: Chat, prompt: TokenSequence, tools: Tools, decode: Callable[[Sequence[int]], str]) -> Fork:
    """Return why the rendered prompt does not start with the ids of the call that its messages continue."""
    ids = prompt.ids
    position = common_tokens(prompt, call.sequence)
    owner = next(chat for chat, end in reversed(list(call.lineage())) if position < end)
    in_reply = position >= owner.prompt_tokens
    before = owner if in_reply else owner.parent  # the call whose turn the template writes differently
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
    # Templates strip the white space around reasoning, which is not a loss of reasoning.
    """Return the reasoning of a reply, from its own field or from its text."""
    return (reply.reasoning_content or reply.text.rpartition("</think>")[0]).strip()


def _common_messages(a: Sequence[ChatMessage], b: Sequence[ChatMessage]) -> int:
    """Return how many leading messages are equal."""
    common = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine is not theirs and mine != theirs:
            break
        common += 1
    return common
