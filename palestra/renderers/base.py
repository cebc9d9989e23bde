"""The interface of a renderer: messages to token ids, and token ids to messages, for one model.

Only this package knows the chat formats of models: code that holds a `Renderer` calls its methods, and never checks
which class it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.renderers.picture_layout import PictureLayout
from palestra.renderers.probes import Unseen
from palestra.renderers.reply_grammar import CallFormat, json_rule, text_rule, with_ordinary_tokens
from palestra.renderers.vocabulary import Vocabulary
from palestra.types.calls import Ids, TokenSequence
from palestra.types.messages import ChatMessage, FunctionCall, TextPart, ToolCall, text_message

Tools = Sequence[Mapping[str, Any]]  # in OpenAI's shape: {"type": "function", "function": {…}}


class NotInThisFormat(Exception):
    """Raised if the chat format of a model has no way to do what was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A tool call that a reply makes, or tries to make."""

    text: str  # as the model wrote it, with the tags around it
    name: str | None = None
    arguments: str | None = None  # JSON text of an object, as written
    problem: str | None = None  # why the call is malformed; None: it is not


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The message that a completion stands for, and its malformed tool calls."""

    message: ChatMessage
    malformed: tuple[str, ...]  # a reason for each malformed call, whose text is in the content


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageDelta:
    """The part of the assistant's message that a piece of a reply adds."""

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
    """The form that a constrained reply must have: calls of tools, an answer, or either.

    Such a reply has no reasoning.
    """

    tools: Tools = ()  # tools that may be called; (): no call is allowed
    most_calls: int = 1  # the most calls in one reply
    schema: Mapping[str, Any] | None = None  # JSON schema of the answer; None: no answer is allowed
    choices: tuple[str, ...] = ()  # texts that the answer may be; excludes tools and a schema


class ReplyStream(ABC):
    """Reads one reply while its text arrives. The deltas, added up, are the message that `finish` returns."""

    over = False  # the reply has ended with its only tool call; later text is ignored

    @abstractmethod
    def feed(self, text: str) -> MessageDelta:
        """Take the next piece of the reply's text, and return the part of the message that is certain now."""

    @abstractmethod
    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """Return the rest of the message, and the whole reply.

        Args:
            completion_ids: int32 [C], all sampled tokens.
            cut: whether the text that was fed ends before the text of `completion_ids` does.
        """


class Renderer(ABC):
    """The chat format of one model.

    Attributes:
        vocabulary: the model's tokenizer.
        stop_ids: tokens that end a reply.
        reasons: whether the model was trained to reason before it answers, as far as its template shows.
        incremental: whether a `stream` gives parts of a reply before its end, and notices the end of a tool call.
        independent_turns: whether a turn has the same tokens in every conversation, so that `extend` with the tokens of
            a written reply returns what `render` would of the whole conversation.
        unseen: roles and keys of messages that the format never shows, such as the `name` of an assistant; see
            `probes.unseen_of`.
        takes_images: whether messages may have images. If not, a call with one is refused before `render` is called.
        picture_layout: what stands in a prompt for an image; None: it takes none, or another library knows.
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
        """Return the prompt of a conversation, int32 [P], which ends where the assistant's reply begins.

        Args:
            room: the most tokens that are of use. None: any number. The limit only saves work: a renderer that can't
                tell early that it is exceeded returns all tokens.

        Raises:
            TooManyTokens: there are more than `room` tokens; raised before all of a long prompt is tokenised.
            ControlTokenInText: a text spells a control token, and this renderer can't write it as text.
            ValueError, KeyError, TemplateError: the format can't show these messages.
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

        Args:
            prompt_ids: returns the call's prompt, int32 [P]; called only if the format needs it.
            completion_ids: int32 [C], as they were sampled.
            new_messages: the messages since the reply. They may be empty, and may include replies that the agent has
                edited.
            room: see `render`.

        Returns:
            The new tokens; positions of images count from the first of them. None: this format can't keep the exact ids
            here, so the caller has to render the whole conversation.

        Raises:
            TooManyTokens, ControlTokenInText, ValueError, KeyError, TemplateError: see `render`.
        """

    @abstractmethod
    def parse(
        self, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call"
    ) -> Reply:
        """Return the assistant's message that a completion stands for.

        Args:
            completion_ids: int32 [C], with or without the stop token.
            prompt_ids: returns the call's prompt, int32 [P]; called only if the format needs it.
            tools: tools whose calls are looked for; without tools, text that looks like a call stays text.
            call_ids: the tool call number k gets the id `{call_ids}_{k}`.
        """

    @abstractmethod
    def stream(
        self, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call", single_call: bool = False
    ) -> ReplyStream:
        """Return a reader for a reply while it is sampled; its result is the same message as that of `parse`.

        Args:
            prompt_ids: see `parse`.
            tools: see `parse`.
            call_ids: see `parse`.
            single_call: whether to end the reply with its first tool call.

        Raises:
            NotInThisFormat: `single_call` is set, and the renderer is not `incremental`.
        """

    def grammar(self, form: ReplyForm) -> str:
        """Return a grammar of the replies that have a form, in the syntax of `llguidance`.

        Raises:
            NotInThisFormat: tool calls can't be constrained in this format.
            RecursionError: a schema is nested too deep.
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
    """Reads a reply to a raw prompt: all of its text is content."""

    def __init__(self) -> None:
        self._content: list[str] = []

    def feed(self, text: str) -> MessageDelta:
        """Return all of the text as content, because a raw prompt has no other parts."""
        self._content.append(text)
        return MessageDelta(content=text)

    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """Return the reply; `completion_ids` [C] and `cut` are not needed, because the text has arrived already."""
        return NOTHING, Reply(message=text_message("assistant", "".join(self._content)), malformed=())


class WholeReplyStream(ReplyStream):
    """Reads a reply only when it is over, for a renderer that parses ids and not text."""

    def __init__(self, renderer: Renderer, prompt_ids: Callable[[], Ids], tools: Tools, call_ids: str) -> None:
        self._renderer, self._prompt_ids, self._tools, self._call_ids = renderer, prompt_ids, tools, call_ids
        self._text: list[str] = []

    def feed(self, text: str) -> MessageDelta:
        """Keep the text; no part of the message is certain before the end."""
        self._text.append(text)
        return NOTHING

    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """Parse the whole reply from `completion_ids` [C].

        If the text was cut (after a stop string), parse the ids before the cut and append the remaining text, because a
        cut may lie within a token.
        """
        kept, rest = len(completion_ids), ""
        if cut:
            text, decode = "".join(self._text), self._renderer.vocabulary.decode
            while kept and not text.startswith(decode(completion_ids[:kept].tolist())):
                kept -= 1
            rest = text[len(decode(completion_ids[:kept].tolist())) :]
        reply = self._renderer.parse(completion_ids[:kept], self._prompt_ids, self._tools, self._call_ids)
        if cut:
            reply = Reply(message=_with_text(reply.message, rest), malformed=reply.malformed)
        return whole_message(reply.message), reply


def _with_text(message: ChatMessage, rest: str) -> ChatMessage:
    """Return a reply with text appended: to its reasoning if the reply has nothing else, otherwise to its content."""
    if message.reasoning_content and not message.text and not message.tool_calls:
        return message.model_copy(update={"reasoning_content": message.reasoning_content + rest})
    return message.model_copy(update={"content": (TextPart(text=message.text + rest),)})


def tool_call(attempt: Attempt, call_ids: str, number: int) -> ToolCall:
    """Return the call number `number` of a reply.

    Args:
        call_ids: prefix of the call's id, which is `{call_ids}_{number}`.
        number: place of the call in the reply.
    """
    function = FunctionCall(name=attempt.name or "", arguments=attempt.arguments or "{}")
    return ToolCall(id=f"{call_ids}_{number}", function=function)


def reply_of(reasoning: str | None, content: str, attempts: Sequence[Attempt], call_ids: str) -> Reply:
    """Return the reply with this reasoning, content and tool calls.

    Args:
        reasoning: text before the answer; None: the reply has none.
        call_ids: prefix of the calls' ids.
    """
    good = [attempt for attempt in attempts if attempt.problem is None]
    calls = tuple(tool_call(attempt, call_ids, number) for number, attempt in enumerate(good))
    message = text_message("assistant", content)
    if reasoning is not None or calls:
        message = message.model_copy(update={"reasoning_content": reasoning, "tool_calls": calls})
    problems = tuple(f"tool call {k}: {a.problem}" for k, a in enumerate(attempts) if a.problem is not None)
    return Reply(message=message, malformed=problems)


def whole_message(message: ChatMessage) -> MessageDelta:
    """Return a complete message as one delta."""
    return MessageDelta(reasoning=message.reasoning_content or "", content=message.text, calls=message.tool_calls)
