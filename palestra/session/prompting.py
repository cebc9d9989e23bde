"""Turn an agent's messages into the exact ids of a prompt, and find out whether it keeps the ids of earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from jinja2 import TemplateError

from palestra.errors import ContextOverflow, HistoryDrift, InvalidRequest, UnsupportedField
from palestra.renderers import Renderer
from palestra.renderers.long_text import TooManyTokens
from palestra.session.context import SessionContext
from palestra.session.history import CallHistory, EarlierCalls, Match
from palestra.session.registry import prompt_digest
from palestra.threads import WorkPool
from palestra.tokens import common_tokens
from palestra.types.calls import Chat, Fork, ForkReason, Ids, MediaSpan, TokenSequence
from palestra.types.messages import ChatMessage, GenerationRequest, TextPart

LONG_TEXT = 8_000  # characters (or as much other work) above which rendering is done in a thread
_VALUE = 40  # a message, tool call or value of a tool costs as much as this many characters, besides its text
MANY_TOKENS = 4096  # decoding more tokens takes longer than handing them to a thread

P = ParamSpec("P")
T = TypeVar("T")
Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The prompt of a call, with everything about it that the call's record holds.

    Attributes:
        sequence: the whole prompt, [P], with all of its images, those of the parent included.
        earlier: the calls that it was compared with.
        digest: of its ids; see `prompt_digest`.
        parent: earlier call with which the prompt has most leading ids in common, if any.
        shared: how many leading ids are the parent's.
        shared_messages: how many leading messages are the parent's.
        fork: where exact tokens of an earlier call are lost; None: none are.
        media: images among the ids that are not shared, by their positions in the prompt.
        whole: whether it was rendered whole, and has no image.
        keys: of its messages; see `CallHistory.add`.
    """

    sequence: TokenSequence
    earlier: EarlierCalls = field(compare=False)
    digest: bytes
    parent: Chat | None
    shared: int
    shared_messages: int = 0
    new_messages: tuple[ChatMessage, ...] = ()
    fork: Fork | None = None
    media: tuple[MediaSpan, ...] = ()
    whole: bool = False
    keys: Mapping[int, Hashable] = field(default_factory=dict, compare=False)


class PromptBuilder:
    """Builds an episode's prompts from the messages and exact ids of its earlier calls."""

    def __init__(self, context: SessionContext) -> None:
        """Create a builder without calls.

        Prompts with pictures use the context's `picture_pool`, because these may have to be decoded first.
        """
        self._context, self._pool = context, context.pool
        self._earlier: dict[tuple[str, str], EarlierCalls] = {}  # by policy and player slot

    def earlier(self, policy: str, agent: str) -> EarlierCalls:
        """Return the calls that a call of an agent is compared with.

        Calls of a player slot share nothing with others, so that prompts do not reveal other players' observations.
        """
        context = self._context
        seat = context.seat_of(agent) if context.seats else ""
        found = self._earlier.get((policy, seat))
        if found is None:
            history = CallHistory(context.sameness, context.policies.unseen(policy))
            name = "" if policy == context.policies.roles.default else policy
            found = self._earlier[policy, seat] = EarlierCalls(name, seat, history)
        return found

    def add(self, chat: Chat, prompt: Prompt | None = None) -> None:
        """Add a call that is on disk, so that later prompts can continue from it. `prompt` is that of the call, if it
        was built here.
        """
        earlier = self.earlier(chat.policy, chat.agent) if prompt is None else prompt.earlier
        earlier.unmerged.append(chat)
        earlier.history.add(chat, None if prompt is None else prompt.keys)
        if prompt is not None and prompt.whole:
            earlier.prompts.setdefault(prompt.digest, chat)

    def clear(self) -> None:
        """Remove all calls at the end of the episode."""
        for earlier in self._earlier.values():
            earlier.clear()
        self._earlier.clear()

    async def build(self, call: GenerationRequest, renderer: Renderer, max_context: int | None) -> Prompt:
        """Return the prompt of a call.

        If the messages continue an earlier call (the longest, if several), the prompt starts with that call's exact
        ids, including sampled ones, and the renderer adds the new messages. Otherwise the whole conversation is
        rendered, and the call with the longest common prefix of ids becomes the parent. `max_context` counts prompt and
        reply together.

        Raises:
            ContextOverflow: the prompt leaves no tokens for a reply; raised early for long prompts.
            InvalidRequest: the prompt is empty, or the template cannot render the messages.
            HistoryDrift: histories are strict, and exact ids would be lost.
            UnsupportedField: a message has an image, and the model accepts none.
        """
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
        ids, media = prompt.sequence
        if max_context is not None and len(ids) >= max_context:
            pictures = len(media), sum(span.tokens for span in media)
            raise ContextOverflow(len(ids), max_context, pictures=pictures)
        return prompt

    async def _of_messages(self, call: GenerationRequest, renderer: Renderer, room: int | None) -> Prompt:
        """Build a prompt from messages; see `build`."""
        earlier = self.earlier(call.policy, call.agent)
        same = earlier.history.same(call.messages)
        pool = self._pool_of(call, same, call.tools, renderer)
        keys: dict[int, Hashable] = {}
        if pool is not None:
            keys = await pool.run(earlier.history.keys, call.messages[same:])
            same = earlier.history.same(call.messages)  # another call may be the newest by now
        past = _Past(earlier, earlier.history.match(call.messages, keys, same), keys)
        prompt = None
        if past.match.call is not None and past.match.call.tools == call.tools:
            prompt = await self._extended(call, renderer, past, past.match.call, room, pool)
        if prompt is None:
            if same:
                pool = self._pool_of(call, 0, call.tools, renderer)
            prompt = await self._rendered(call, renderer, past, room, pool)
        if self._context.strict_history and prompt.fork is not None and prompt.fork.reason.is_drift:
            fork = prompt.fork
            raise HistoryDrift(fork.reason.value, fork.call, fork.message, fork.position)
        return prompt

    async def _laid_out(
        self, call: GenerationRequest, prompt: str | tuple[int, ...], renderer: Renderer, room: int | None
    ) -> Prompt:
        """Build a prompt from text or ids of the caller; a call of the policy that it begins with is its parent."""
        vocabulary = renderer.vocabulary
        if isinstance(prompt, str):
            ids: Ids = await _in(self._pool if len(prompt) > LONG_TEXT else None, vocabulary.encode, prompt, room)
        elif room is not None and len(prompt) > room:
            raise ContextOverflow(len(prompt), room + 1)
        else:
            ids = np.asarray(prompt, np.int32)
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= len(vocabulary):
            raise InvalidRequest(
                f"prompt: it has no token, or ids that are none; ids are below {len(vocabulary)}", "prompt"
            )
        earlier = self.earlier(call.policy, call.agent)
        parent, shared = earlier.trie().longest(ids)
        digest = prompt_digest(ids, earlier.policy, earlier.seat)
        return Prompt(sequence=TokenSequence(ids), earlier=earlier, digest=digest, parent=parent, shared=shared)

    def _pool_of(self, call: GenerationRequest, first: int, tools: Tools, renderer: Renderer) -> WorkPool | None:
        """Return the threads that messages and tools have to be rendered in; None: the event loop, they are short.

        Args:
            first: number of the first of the messages.

        Raises:
            UnsupportedField: one has a picture, and the model takes none: to drop it would change the prompt.
        """
        left, has_pictures = LONG_TEXT, False
        for number, message in enumerate(call.messages[first:], first):
            left -= _VALUE + len(message.reasoning_content or "")
            for k, part in enumerate(message.content):
                if isinstance(part, TextPart):
                    left -= len(part.text)
                elif renderer.takes_images:
                    has_pictures = True
                else:
                    place = f"messages.{number}.content.{k}"
                    raise UnsupportedField(
                        f"{place}: the model of the policy {call.policy!r} takes no images; leave the picture out",
                        place,
                    )
            for tool_call in message.tool_calls:
                left -= _VALUE + len(tool_call.function.name) + len(tool_call.function.arguments)
        if has_pictures:
            return self._context.picture_pool
        return self._pool if left < 0 or (tools and _left_of(left, tools) < 0) else None

    async def _extended(
        self,
        asked: GenerationRequest,
        renderer: Renderer,
        past: _Past,
        call: Chat,
        room: int | None,
        pool: WorkPool | None,
    ) -> Prompt | None:
        """Build a prompt that keeps the exact ids of the call that the messages continue."""
        earlier, match, keys = past
        new = asked.messages[match.messages :]
        if pool is not None:  # only the new messages are rendered, so the others and the tools do not count as work
            pool = self._pool_of(asked, match.messages, (), renderer)
        room = None if room is None or pool is None else max(room - call.tokens, 0)
        said = (lambda: call.prompt_ids), call.completion_ids
        tail = await _in(pool, renderer.extend, *said, new, asked.tools, room)
        if tail is None:
            return None
        ids = np.concatenate((call.ids, tail.ids)).astype(np.int32, copy=False)
        media: tuple[MediaSpan, ...] = ()
        before: tuple[MediaSpan, ...] = ()
        if renderer.takes_images:
            media = tuple(span._replace(start=span.start + call.tokens) for span in tail.media)
            before = call.all_media
        whole = TokenSequence(ids, (*before, *media))
        return Prompt(
            sequence=whole,
            media=media,
            parent=call,
            shared=call.tokens,
            shared_messages=match.messages,
            new_messages=new,
            fork=None if match.reason is None else _fork(match.reason, match.left, match.known, whole),
            earlier=earlier,
            digest=prompt_digest(ids, earlier.policy, earlier.seat),
            keys=keys,
        )

    async def _rendered(
        self, call: GenerationRequest, renderer: Renderer, past: _Past, room: int | None, pool: WorkPool | None
    ) -> Prompt:
        """Render the whole conversation, and find out why it does not start with an earlier call, if it should have."""
        messages, tools, (earlier, match, keys) = call.messages, call.tools, past
        if (
            pool is None
        ):  # a short prompt is tokenised whole, so that the error for one that does not fit has its length
            whole = renderer.render(messages, tools)
        else:
            whole = await pool.run(renderer.render, messages, tools, room)
        exact = match.call is not None and common_tokens(whole, match.call.sequence) == match.call.tokens
        digest = prompt_digest(whole.ids, earlier.policy, earlier.seat)
        known = (match.call, match.call.tokens) if match.call and exact else None
        parent, shared = known or earlier.longest(whole, digest)
        fork = None
        left = match.left
        # What differs may be nothing that this template shows.
        same_text = left is not None and common_tokens(whole, left.sequence) == left.tokens
        if match.reason is not None and not same_text:
            fork = _fork(match.reason, left, match.known, whole)
        elif match.call is not None and not exact:
            decoding = self._pool if len(whole.ids) > MANY_TOKENS else None
            fork = await _in(decoding, _drift, match.call, whole, tools, renderer.vocabulary.decode)
        shared_messages = 0 if parent is None else _common_messages(messages, parent)
        return Prompt(
            sequence=whole,
            media=_from(whole.media, shared) if whole.media else (),
            parent=parent,
            shared=shared,
            shared_messages=shared_messages,
            new_messages=messages[shared_messages:],
            fork=fork,
            earlier=earlier,
            digest=digest,
            whole=not whole.media,
            keys=keys,
        )


class _Past(NamedTuple):
    """The earlier calls of a conversation, what it has in common with them, and keys of its messages."""

    earlier: EarlierCalls
    match: Match
    keys: Mapping[int, Hashable]


async def _in(pool: WorkPool | None, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a function, called in a thread of the pool; None: it is short, and called here."""
    return function(*args, **kwargs) if pool is None else await pool.run(function, *args, **kwargs)


def _left_of(left: int, tools: Tools) -> int:
    """Return how much is left of some work, in characters, after that of tools; stops below 0."""
    values: list[Any] = list(tools[: LONG_TEXT // _VALUE + 1])
    while values and left >= 0:
        value = values.pop()
        left -= _VALUE + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
    return left


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
    shown = decode(ids[owner.prompt_tokens :].tolist()) if in_reply else ""
    if call.tools != tools:
        reason = ForkReason.TOOLS_CHANGED
    elif decode(ids.tolist()).startswith(decode(call.ids.tolist())):
        reason = ForkReason.TOKENIZATION
    elif before is not None and before.finish_reason == "length":
        reason = ForkReason.TRUNCATED_TURN
    elif in_reply and _thought(owner.reply) not in shown:
        reason = ForkReason.REASONING_STRIPPED
    elif in_reply and any(one.function.arguments not in shown for one in owner.reply.tool_calls):
        reason = ForkReason.TOOL_ARGUMENTS
    else:
        reason = ForkReason.TEMPLATE
    message = len(owner.messages) if in_reply else owner.shared_messages
    return Fork(reason=reason, call=call.index, message=message, position=position)


def _thought(reply: ChatMessage) -> str:
    # Templates strip the white space around reasoning, which is not a loss of reasoning.
    """Return the reasoning of a reply, from its own field or from its text."""
    return (reply.reasoning_content or reply.text.rpartition("</think>")[0]).strip()


def _common_messages(messages: Sequence[ChatMessage], call: Chat) -> int:
    """Return how many leading messages are those of an earlier call, or its reply; of a raw prompt there are none."""
    before = call.messages
    if not before:
        return 0
    common = 0
    for mine, theirs in zip(messages, (*before, call.reply), strict=False):
        if mine is not theirs and mine != theirs:
            break
        common += 1
    return common
