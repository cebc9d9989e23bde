"""The interface of a renderer: messages to token ids, and token ids to messages, for one model.

Only this package knows the chat formats of models: other code calls a `Renderer`'s methods, and never checks its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.renderers.picture_layout import PictureLayout
from palestra.renderers.probes import Unseen
from palestra.renderers.reply_grammar import CallFormat, json_rule, text_rule, with_ordinary_tokens
from palestra.renderers.vocabulary import Vocabulary
from palestra.types.calls import Ids, TokenSequence
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall, text_message

Tools = Sequence[Mapping[str, Any]]  # in OpenAI's shape: {"type": "function", "function": {…}}


class NotInThisFormat(Exception):
    """The model's chat format does not support the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A tool call, or a malformed attempt, in a reply."""

    text: str  # as the model wrote it, with the tags around it
    name: str | None = None
    arguments: str | None = None  # JSON text of an object, as written
    problem: str | None = None  # why the call is malformed; None: it is not


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The message of a completion, and its malformed tool calls."""

    message: ChatMessage
    malformed: tuple[str, ...]  # a reason for each malformed call, whose text is in the content


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageDelta:
    """The part of the assistant's message added by a piece of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __add__(self, other: MessageDelta) -> MessageDelta:
        return MessageDelta(
            reasoning=self.reasoning + other.reasoning,
            content=self.content + other.content,
            calls=self.calls + other.calls,
        )


NOTHING = MessageDelta()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyForm:
    """The required form of a constrained reply: tool calls, an answer, or either, without reasoning."""

    tools: Tools = ()  # tools that may be called; (): no call is allowed
    most_calls: int = 1  # the most calls in one reply
    schema: Mapping[str, Any] | None = None  # JSON schema of the answer; None: no answer is allowed
    choices: tuple[str, ...] = ()  # texts that the answer may be; excludes tools and a schema


class ReplyStream(ABC):
    """Parses one reply while its text arrives. The deltas add up to the message that `finish` returns."""

    over = False  # the reply has ended with its only tool call; later text is ignored

    @abstractmethod
    def feed(self, text: str) -> MessageDelta:
        """Add a piece of the reply's text, and return the part of the message that is now certain."""

    @abstractmethod
    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """Return the rest of the message, and the whole reply. `completion_ids` [C] are all sampled tokens; `cut`: the
        text ended before theirs.
        """


class Renderer(ABC):
    """The chat format of one model.

    Attributes:
        stop_ids: tokens that end a reply.
        reasons: whether the model was trained to reason before it answers, according to its template.
        incremental: whether a `stream` gives parts of a reply before its end, and detects the end of a tool call.
        independent_turns: whether a turn has the same tokens in every conversation, so that `extend` with a written
            reply gives the same ids as `render` of the whole conversation.
        unseen: roles and keys of messages that the format omits, such as the `name` of an assistant; see
            `probes.unseen_of`.
        takes_images: whether messages may have images; otherwise such a call is refused before `render`.
        picture_layout: placeholders of images; None: no images, or another library writes them.
    """

    vocabulary: Vocabulary
    stop_ids: tuple[int, ...]
    reasons: bool
    incremental: bool
    independent_turns: bool
    unseen: Unseen = frozenset()
    takes_images: bool = False
    picture_layout: PictureLayout | None = None

    @abstractmethod
    def render(self, messages: Sequence[ChatMessage], tools: Tools = (), room: int | None = None) -> TokenSequence:
        """Return the prompt of a conversation, int32 [P], up to the beginning of the assistant's reply.

        Args:
            room: limit that saves work; None: unlimited. A renderer that cannot detect the excess early returns all
                tokens.

        Raises:
            TooManyTokens: there are more than `room` tokens; raised before a long prompt is tokenised completely.
            ControlTokenInText: a text spells a control token, and this renderer cannot write it as text.
            ValueError, KeyError, TemplateError: the format cannot represent these messages.
        """

    @abstractmethod
    def extend(
        self,
        prompt_ids: Callable[[], Ids],
        completion_ids: Ids,
        new_messages: Sequence[ChatMessage],
        tools: Tools = (),
        room: int | None = None,
    ) -> TokenSequence | None:
        """Return the tokens, int32 [N], that follow a call's exact tokens when `new_messages` follow its reply.

        Positions of images count from the first new token. None: this format cannot keep the exact ids here; render the
        whole conversation.

        Args:
            prompt_ids: returns the call's prompt, int32 [P]; called only if the format needs it.
            completion_ids: int32 [C], as sampled.
            new_messages: the messages since the reply, possibly empty, or including replies that the agent edited.
            room: see `render`.

        Raises:
            TooManyTokens, ControlTokenInText, ValueError, KeyError, TemplateError: see `render`.
        """

    @abstractmethod
    def parse(
        self, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call"
    ) -> Reply:
        """Return the assistant's message of a completion.

        `completion_ids` are int32 [C], with or without the stop token; `prompt_ids` is called only if the format needs
        it. Without tools, text that looks like a call stays text; call number k gets the id `{call_ids}_{k}`.
        """

    def stream(
        self, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call", single_call: bool = False
    ) -> ReplyStream:
        """Return a parser for a reply while it is sampled; its result equals that of `parse`. `single_call`: the first
        tool call ends the reply. Raises NotInThisFormat: `single_call` is set, but the renderer is not `incremental`.

        This one, of a renderer that is not, parses when the reply is over.
        """
        if single_call:
            raise NotInThisFormat("the end of a call is not noticed in this model's format")
        return WholeReplyStream(self, prompt_ids, tools, call_ids)

    def grammar(self, form: ReplyForm) -> str:
        """Return a grammar of replies in a form, in the syntax of `llguidance`. Raises NotInThisFormat: tool calls
        cannot be constrained in this format. Raises RecursionError: a schema is nested too deep.
        """
        return with_ordinary_tokens(self._rules(form), [form.tools, form.schema, form.choices], self.vocabulary.added)

    def _rules(self, form: ReplyForm) -> str:
        if form.choices:
            return f"start: {' | '.join(map(text_rule, form.choices))}\n"
        answer = "" if form.schema is None else json_rule(form.schema)
        if not form.tools:
            return f"start: {answer}\n"
        calls = self._call_format().rules(form.tools, form.most_calls)
        return f"start: calls | answer\n{calls}answer: {answer}\n" if answer else f"start: calls\n{calls}"

    @abstractmethod
    def _call_format(self) -> CallFormat:
        """Return how calls are written."""


class PlainTextStream(ReplyStream):
    """Parses a reply to a raw prompt: all of its text is content."""

    def __init__(self) -> None:
        self._content: list[str] = []

    def feed(self, text: str) -> MessageDelta:
        """Return the text as content."""
        self._content.append(text)
        return MessageDelta(content=text)

    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """Return the reply; its text has arrived already."""
        return NOTHING, Reply(message=text_message("assistant", "".join(self._content)), malformed=())


class WholeReplyStream(ReplyStream):
    """Parses a reply when it is over, for a renderer that parses ids instead of text."""

    def __init__(self, renderer: Renderer, prompt_ids: Callable[[], Ids], tools: Tools, call_ids: str) -> None:
        self._renderer, self._prompt_ids, self._tools, self._call_ids = renderer, prompt_ids, tools, call_ids
        self._text: list[str] = []

    def feed(self, text: str) -> MessageDelta:
        """Store the text; the message is only known at the end."""
        self._text.append(text)
        return NOTHING

    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """Parse the whole reply from `completion_ids` [C].

        If a stop string cut the text, the ids before the cut are parsed, and those of the text that is left of the
        token that was cut.
        """
        if cut:
            text, vocabulary, kept = "".join(self._text), self._renderer.vocabulary, len(completion_ids)
            while kept and not text.startswith(vocabulary.decode(completion_ids[:kept].tolist())):
                kept -= 1
            completion_ids = completion_ids[:kept]
            rest = text[len(vocabulary.decode(completion_ids.tolist())) :]
            ids = vocabulary.long_text.encode(rest, len(rest.encode()))
            completion_ids = np.concatenate((completion_ids, np.asarray(ids, np.int32)))
        reply = self._renderer.parse(completion_ids, self._prompt_ids, self._tools, self._call_ids)
        return whole_message(reply.message), reply


def tool_call(attempt: Attempt, call_ids: str, number: int) -> ToolCall:
    """Return call number `number` of a reply, with the id `{call_ids}_{number}`."""
    function = FunctionCall(name=attempt.name or "", arguments=attempt.arguments or "{}")
    return ToolCall(id=f"{call_ids}_{number}", function=function)


def reply_of(reasoning: str | None, content: str, attempts: Sequence[Attempt], call_ids: str) -> Reply:
    """Return the reply with this reasoning, content and tool calls."""
    if reasoning is None and not attempts:
        return Reply(message=text_message("assistant", content), malformed=())
    good = [attempt for attempt in attempts if attempt.problem is None]
    calls = tuple(tool_call(attempt, call_ids, number) for number, attempt in enumerate(good))
    message = text_message("assistant", content)
    if reasoning is not None or calls:
        message = message.model_copy(update={"reasoning_content": reasoning, "tool_calls": calls})
    problems = tuple(f"tool call {k}: {a.problem}" for k, a in enumerate(attempts) if a.problem is not None)
    return Reply(message=message, malformed=problems)


def shown_reply(
    renderer: Renderer, prompt_ids: Ids, messages: Sequence[ChatMessage], reply: ChatMessage, tools: Tools
) -> Ids | None:
    """Return the ids of a given reply to its end token, int32 [C], as the format shows them after its prompt, [P].

    None: with the reply, the format shows the messages before it by other ids. Raises what `Renderer.render` does.
    """
    # Only a template with a message after the reply shows how the reply ends; what follows its end token is not the
    # reply's.
    whole = renderer.render((*messages, reply, text_message("user", "x")), tools).ids
    rest = whole[len(prompt_ids) :]
    ends = np.flatnonzero(np.isin(rest, renderer.stop_ids))
    if not np.array_equal(whole[: len(prompt_ids)], prompt_ids) or not len(ends):
        return None
    return rest[: int(ends[0]) + 1]


def whole_message(message: ChatMessage) -> MessageDelta:
    """Return a complete message as one delta."""
    return MessageDelta(reasoning=message.reasoning_content or "", content=message.text, calls=message.tool_calls)
