"""What turns messages into token ids, and token ids into messages, for one model.

A model's chat format is known in this room alone: code that holds a `Renderer` asks the renderer, and never which one
it is.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.chat.vocabulary import Vocabulary
from palestra.schemas.messages import ChatMessage, FunctionCall, TextPart, ToolCall, text_message
from palestra.schemas.records import Ids, TokenSequence

Tools = Sequence[Mapping[str, Any]]  # OpenAI's: {"type": "function", "function": {…}}


class NotInThisFormat(Exception):
    """The chat format of a model has no way to do what was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A tool call that a reply makes or tries to make."""

    text: str  # as the model wrote it, with what marks it as a call
    name: str | None = None
    arguments: str | None = None  # JSON text of an object, as written
    problem: str | None = None  # why it can't be called; None: it can


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The message that a completion stands for."""

    message: ChatMessage
    malformed: tuple[str, ...]  # why a tool call could not be understood, one a call; their text is in the content


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageDelta:
    """What a piece of a reply adds to the assistant's message."""

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
    """What a reply has to be: calls of tools, an answer, or one or the other. A constrained reply has no reasoning."""

    tools: Tools = ()  # the ones that may be called; (): no call is allowed
    most_calls: int = 1  # how many calls one reply may make
    schema: Mapping[str, Any] | None = None  # JSON schema of the answer; None: no answer is allowed
    choices: tuple[str, ...] = ()  # the answer is one of these, and neither tools nor a schema are given


class ReplyStream(ABC):
    """Takes one reply apart while its text arrives. The deltas, put together, are the message of `finish`."""

    over = False  # the reply has ended with its only tool call; nothing that follows is read

    @abstractmethod
    def feed(self, text: str) -> MessageDelta:
        """Take the next piece of the reply's text; return what is certain of the message with it."""

    @abstractmethod
    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """Return what was not certain before, and the whole reply.

        Args:
            completion_ids: [C], everything that was sampled.
            cut: whether the text that was fed ends before the text of `completion_ids` does.
        """


class Renderer(ABC):
    """The chat format of one model.

    Attributes:
        vocabulary: the model's tokenizer.
        stop_ids: tokens that end a reply.
        reasons: whether the model was made to reason before it answers, as far as its template says.
        incremental: whether a `stream` tells parts of a reply before its end, and notices the end of a tool call.
    """

    vocabulary: Vocabulary
    stop_ids: tuple[int, ...]
    reasons: bool
    incremental: bool

    @abstractmethod
    def render(self, messages: Sequence[ChatMessage], tools: Tools = (), room: int | None = None) -> TokenSequence:
        """Return the prompt of a conversation, [P], which ends where the assistant has to go on.

        Args:
            messages: the conversation.
            tools: the ones that the model is offered.
            room: how many tokens there may be. None: any number. It only saves work: a renderer that can't tell early
                that there are more returns all of them.

        Raises:
            TooManyTokens: there are more than `room`; found before all of a long prompt is tokenised.
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
        """Return what follows a call's exact prompt and completion, [N], where `new_messages` follow its reply.

        Args:
            prompt_ids: returns the call's prompt, [P]; only asked for where the format needs it.
            completion_ids: [C], as they were sampled.
            new_messages: what was said since. They may be none, and replies that the agent changed may be among them.
            tools: those of the call.
            room: see `render`.

        Returns:
            The new tokens, with positions of images counted from the first of them. None: this format can't keep the
            exact ids here.

        Raises:
            TooManyTokens, ControlTokenInText, ValueError, KeyError, TemplateError: see `render`.
        """

    @abstractmethod
    def parse(
        self, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call"
    ) -> Reply:
        """Return the assistant's message that a completion stands for.

        Args:
            completion_ids: [C], with or without the stop token.
            prompt_ids: returns the call's prompt, [P]; only asked for where the format needs it.
            tools: those whose calls are looked for; without any, what looks like a call is text.
            call_ids: the tool call number k gets the id `{call_ids}_{k}`.
        """

    @abstractmethod
    def stream(
        self, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call", single_call: bool = False
    ) -> ReplyStream:
        """Return what reads a reply while it is sampled, to the same message as `parse`.

        Args:
            prompt_ids: see `parse`.
            tools: see `parse`.
            call_ids: see `parse`.
            single_call: end the reply with its first tool call.

        Raises:
            NotInThisFormat: `single_call`, and the renderer is not `incremental`.
        """

    def grammar(self, form: ReplyForm) -> str:
        """Return what replies of a form look like in this format, in a form that `llguidance` reads.

        Raises:
            NotInThisFormat: tool calls can't be constrained in this format.
            RecursionError: a schema is nested too deep.
        """
        if form.choices:
            return f"start: {' | '.join(map(json.dumps, form.choices))}\n"
        if not form.tools:
            return json.dumps({"grammars": [{"json_schema": form.schema}]})
        calls = self._grammar_of_calls(form.tools, form.most_calls)
        if form.schema is None:
            return "start: calls\n" + calls
        return f"start: calls | answer\n{calls}answer: %json {json.dumps(form.schema)}\n"

    @abstractmethod
    def _grammar_of_calls(self, tools: Tools, most_calls: int) -> str:
        """Return rules, of which one is named `calls`: from one call of these tools to `most_calls`.

        Raises:
            NotInThisFormat: there are none for this format.
        """


class PlainTextStream(ReplyStream):
    """Reads a reply to a prompt that its caller has laid out: all of it is content."""

    def __init__(self) -> None:
        self._content: list[str] = []

    def feed(self, text: str) -> MessageDelta:
        """See `ReplyStream`."""
        self._content.append(text)
        return MessageDelta(content=text)

    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """See `ReplyStream`."""
        return NOTHING, Reply(message=text_message("assistant", "".join(self._content)), malformed=())


class WholeReplyStream(ReplyStream):
    """Reads a reply when it is over, for a renderer that reads ids and not text."""

    def __init__(self, renderer: Renderer, prompt_ids: Callable[[], Ids], tools: Tools, call_ids: str) -> None:
        self._renderer, self._prompt_ids, self._tools, self._call_ids = renderer, prompt_ids, tools, call_ids
        self._text: list[str] = []

    def feed(self, text: str) -> MessageDelta:
        """See `ReplyStream`."""
        self._text.append(text)
        return NOTHING

    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """See `ReplyStream`. Of a reply that was cut, the ids before the cut are read and the rest is added as text."""
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
    """Return a reply with text at its end: in its reasoning, if there is nothing behind that."""
    if message.reasoning_content and not message.text and not message.tool_calls:
        return message.model_copy(update={"reasoning_content": message.reasoning_content + rest})
    return message.model_copy(update={"content": (TextPart(text=message.text + rest),)})


def tool_call(attempt: Attempt, call_ids: str, number: int) -> ToolCall:
    """Return the call number `number` of a reply; its id is `{call_ids}_{number}`."""
    function = FunctionCall(name=attempt.name or "", arguments=attempt.arguments or "{}")
    return ToolCall(id=f"{call_ids}_{number}", function=function)


def reply_of(reasoning: str | None, content: str, attempts: Sequence[Attempt], call_ids: str) -> Reply:
    """Return the reply that consists of reasoning (None: it has none), content and tool calls."""
    good = [attempt for attempt in attempts if attempt.problem is None]
    calls = tuple(tool_call(attempt, call_ids, number) for number, attempt in enumerate(good))
    message = text_message("assistant", content)
    if reasoning is not None or calls:
        message = message.model_copy(update={"reasoning_content": reasoning, "tool_calls": calls})
    problems = tuple(f"tool call {k}: {a.problem}" for k, a in enumerate(attempts) if a.problem is not None)
    return Reply(message=message, malformed=problems)


def whole_message(message: ChatMessage) -> MessageDelta:
    """Return a message that is there all at the same time as one delta."""
    return MessageDelta(reasoning=message.reasoning_content or "", content=message.text, calls=message.tool_calls)
