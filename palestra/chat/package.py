"""Renderers of the `renderers` package, with messages whose text is never a control token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError

from palestra.chat.base import (
    Attempt,
    NotInThisFormat,
    Renderer,
    Reply,
    ReplyStream,
    Tools,
    WholeReplyStream,
    reply_of,
)
from palestra.chat.control_text import ControlText, control_tokens
from palestra.chat.json_text import object_text, read_object
from palestra.chat.long_text import PIECE, TooManyTokens
from palestra.chat.probes import PLAIN, Probe, shows_reasoning
from palestra.chat.vocabulary import Vocabulary
from palestra.errors import ControlTokenInText, InvalidRequest
from palestra.schemas.messages import ChatMessage
from palestra.schemas.records import Ids, TokenSequence

# Its library (harmony) encodes each text without control tokens, and with a vocabulary of its own: marks would stay.
_SAFE = frozenset({"gpt-oss"})


class PackageRenderer(Renderer):
    """A renderer of the package. Text that spells a control token becomes ordinary tokens, or is refused.

    Messages without such text take the package's own way, untouched. A bridge of the package is taken only where it
    begins with the exact ids. Replies are read as a whole.
    """

    incremental = False

    def __init__(self, tokenizer: Any, inner: Any) -> None:
        """Take a tokenizer of transformers, and a renderer that the package made for it."""
        self._tokenizer = tokenizer
        self._inner = inner
        self.config = inner.config
        self.vocabulary = Vocabulary(tokenizer)
        self.stop_ids = tuple(inner.get_stop_token_ids())
        self.reasons = self._opens_reasoning() or shows_reasoning(self._shown)

    def render(self, messages: Sequence[ChatMessage], tools: Tools = (), room: int | None = None) -> TokenSequence:
        """See `Renderer`."""
        self._check_room(messages, room)
        renderer, given, offered = self._guarded(_dicts(messages), _given(tools))
        return TokenSequence(
            np.asarray(renderer.render_ids(given, tools=offered, add_generation_prompt=True), np.int32)
        )

    def extend(
        self,
        prompt_ids: Callable[[], Ids],
        completion_ids: Ids,
        new_messages: Sequence[ChatMessage],
        tools: Tools = (),
        room: int | None = None,
    ) -> TokenSequence | None:
        """See `Renderer`."""
        self._check_room(new_messages, room)
        prompt, completion = prompt_ids().tolist(), completion_ids.tolist()
        names: dict[str, str] = {}
        if any(m.role == "tool" and m.name is None for m in new_messages):
            _, _, attempts = self._read(completion_ids, prompt_ids, tools)
            names = _names([a.name or "" for a in attempts if a.problem is None], new_messages)
        renderer, given, offered = self._guarded(_dicts(new_messages, names), _given(tools))
        bridged = renderer.bridge_to_next_turn(prompt, completion, given, tools=offered)
        if bridged is None:
            return None
        history = prompt + completion
        if list(bridged.token_ids[: len(history)]) != history:
            return None
        return TokenSequence(np.asarray(bridged.token_ids[len(history) :], np.int32))

    def parse(
        self, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call"
    ) -> Reply:
        """See `Renderer`."""
        return reply_of(*self._read(completion_ids, prompt_ids, tools), call_ids)

    def stream(
        self, prompt_ids: Callable[[], Ids], tools: Tools = (), call_ids: str = "call", single_call: bool = False
    ) -> ReplyStream:
        """See `Renderer`."""
        if single_call:
            raise NotInThisFormat("the end of a call is not noticed")
        return WholeReplyStream(self, prompt_ids, tools, call_ids)

    def _grammar_of_calls(self, tools: Tools, most_calls: int) -> str:
        raise NotInThisFormat("calls can't be constrained")

    def _check_room(self, messages: Sequence[ChatMessage], room: int | None) -> None:
        """Refuse what no template could make fit.

        Every template writes what users say, but perhaps not the white space at its edges.

        Raises:
            TooManyTokens: there are more than `room`.
        """
        said = [message.text.strip() for message in messages if message.role == "user"]
        if room is not None and sum(map(len, said)) > PIECE:
            fewest = self.vocabulary.long_text.fewest("".join(said))
            if fewest > room:
                raise TooManyTokens(fewest)

    def _read(
        self, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools
    ) -> tuple[str | None, str, list[Attempt]]:
        """Return reasoning (None: there is none), content and tool calls of a reply, as the package reads it."""
        ids = completion_ids.tolist()
        try:
            parsed = self._inner.parse_response(ids, tools=_given(tools), prompt_ids=prompt_ids().tolist())
        except RecursionError:  # a model can write JSON that no parser of the package can read
            end = next((k for k, token in enumerate(ids) if token in self.stop_ids), len(ids))
            text = self._tokenizer.decode(ids[:end])
            return None, text, [Attempt(text=text, problem="it is nested too deep")] if tools else []
        attempts = [_attempt(call) for call in parsed.tool_calls]
        text = [a.text for a in attempts if a.problem is not None or not tools]
        content = "\n".join([parsed.content, *text] if parsed.content else text)
        return parsed.reasoning_content or None, content, attempts if tools else []

    def _opens_reasoning(self) -> bool:
        """Return whether the prompt ends where the model has to begin to think."""
        ids = self._shown(PLAIN[0])
        return ids is not None and str(self._tokenizer.decode(ids[-16:])).rstrip().endswith("<think>")

    def _shown(self, probe: Probe) -> list[int] | None:
        """Return the ids of a conversation; None where the renderer refuses it."""
        messages, tools = list(probe.messages), list(probe.tools) or None
        try:
            return list(self._inner.render_ids(messages, tools=tools, add_generation_prompt=True))
        except (TemplateError, KeyError, TypeError, ValueError):
            return None

    def _guarded(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> tuple[Any, Any, Any]:
        """Return the renderer that has to be used, and the messages and tools to give to it."""
        if self.config.name in _SAFE:
            return self._inner, messages, tools
        try:
            given, offered = _marked(messages, self._control), _marked(tools, self._control)
        except RecursionError:
            raise InvalidRequest("a message or a tool is nested too deep") from None
        if given is messages and offered is tools:
            return self._inner, messages, tools
        if self._marking is None:
            for where, value in (("a tool", tools), *((f"a message of role {m['role']}", m) for m in messages)):
                if (token := _found(value, self._control)) is not None:
                    raise ControlTokenInText(where, token)
            return self._inner, messages, tools  # only an edge of a text looks like part of a control token
        return self._marking, given, offered

    @cached_property
    def _control(self) -> ControlText:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            names = dict.fromkeys(self._tokenizer.all_special_tokens)
            return ControlText({name: self._tokenizer.convert_tokens_to_ids(name) for name in names}, None)
        return ControlText(control_tokens(backend, self.stop_ids), backend)

    @cached_property
    def _marking(self) -> Any | None:
        """The same renderer with a tokenizer that understands marks; None: there can be none."""
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return None
        from renderers import create_renderer

        return create_renderer(_MarkedTokenizer(self._tokenizer, self._control), self.config)


def _attempt(call: Any) -> Attempt:
    """Return a call that the package has read, or has tried to."""
    if call.status != "ok" or not call.name:
        return Attempt(text=call.raw, problem=str(call.status))
    arguments = _arguments(call.raw, call.arguments)
    problem = None if arguments is not None else "its arguments are not a JSON object"
    return Attempt(text=call.raw, name=call.name, arguments=arguments, problem=problem)


def _arguments(raw: str, value: Any) -> str | None:
    """Return arguments as the model wrote them, where that is JSON; else their value as JSON. None: it is no object."""
    if isinstance(value, str):
        return object_text(value)
    try:
        members = read_object(raw)[0]
        written = members.get("arguments") or members.get("parameters")
    except ValueError:  # the format is not JSON
        written = None
    if written is not None and isinstance(value, dict) and written.value == value:
        return written.text
    try:
        return object_text(json.dumps({} if value is None else value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


def _given(tools: Tools) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None


def _names(called: Sequence[str], answers: Sequence[ChatMessage]) -> dict[str, str]:
    """Return the names of tools by the ids of calls; `reply_of` ends the id of call k with `_k`."""
    ids = [m.tool_call_id for m in answers if m.tool_call_id is not None]
    numbers = {call: call.rpartition("_")[2] for call in ids}
    return {call: called[int(k)] for call, k in numbers.items() if k in {str(i) for i in range(len(called))}}


def _dicts(messages: Sequence[ChatMessage], names: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return messages as the package takes them, the answers of tools with the tools' names: some formats show them."""
    named = {**(names or {}), **{call.id: call.function.name for m in messages for call in m.tool_calls}}
    return [_dict(message, named) for message in messages]


def _dict(message: ChatMessage, names: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning_content:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else None)
    if name is not None:
        out["name"] = name
    return out


class _MarkedTokenizer:
    """A tokenizer that encodes marked strings as `ControlText` says, and is in all else the one that it has."""

    def __init__(self, tokenizer: Any, control: ControlText) -> None:
        self._tokenizer = tokenizer
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        if self._control.marker not in text:
            return list(self._tokenizer.encode(text, **options))
        return self._control.encode(text)[0]

    def __call__(self, text: str, **options: Any) -> Any:
        if self._control.marker not in text:
            return self._tokenizer(text, **options)
        ids, offsets = self._control.encode(text)
        return {"input_ids": ids, "offset_mapping": offsets}

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, **options | {"tokenize": False})
        return self._control.encode(text)[0]


def _marked(value: Any, control: ControlText) -> Any:
    """Return the value with marks in all strings of it; the value itself where none needs any."""
    if isinstance(value, str):
        return control.mark(value)
    if isinstance(value, Mapping):
        pairs = [(control.mark(key), _marked(inner, control)) for key, inner in value.items()]
        same = all(a is b for a, (_, b) in zip(value.values(), pairs, strict=True))
        return value if same and all(a is b for a, (b, _) in zip(value, pairs, strict=True)) else dict(pairs)
    if isinstance(value, Sequence):
        items = [_marked(inner, control) for inner in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else items
    return value


def _found(value: Any, control: ControlText) -> str | None:
    """Return the first control token that a string of the value spells."""
    if isinstance(value, str):
        return control.find(value)
    if isinstance(value, Mapping):
        return _found([*value, *value.values()], control)
    if isinstance(value, Sequence):
        return next((name for inner in value if (name := _found(inner, control)) is not None), None)
    return None
