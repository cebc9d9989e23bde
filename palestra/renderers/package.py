"""Renderers of the package `renderers`, guarded so that text in messages never becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError

from palestra.errors import ControlTokenInText, InvalidRequest
from palestra.renderers.base import (
    Attempt,
    NotInThisFormat,
    Renderer,
    Reply,
    Tools,
    reply_of,
)
from palestra.renderers.control_text import ControlText, control_tokens
from palestra.renderers.long_text import PIECE, TooManyTokens
from palestra.renderers.probes import PLAIN, Probe, Unseen, shows_reasoning, template_text, unseen_of
from palestra.renderers.reply_grammar import PROBE_TOOLS, CallFormat, find_call_format, probe_reply
from palestra.renderers.tool_calls import object_text, read_object
from palestra.renderers.vocabulary import Vocabulary
from palestra.types.calls import Ids, TokenSequence
from palestra.types.messages import ChatMessage

# Its library (harmony) never encodes text as control tokens, and has its own vocabulary: marks would stay in the text.
_SAFE = frozenset({"gpt-oss"})


class PackageRenderer(Renderer):
    """A renderer of the package `renderers`. Text that spells a control token becomes ordinary tokens, or is refused.

    The package renders messages without such text unchanged. Its bridge to the next turn is used only if the result
    begins with the exact ids. Replies are parsed as a whole.
    """

    incremental = False
    independent_turns = False  # such as those of templates that drop the reasoning of earlier turns

    def __init__(self, tokenizer: Any, inner: Any) -> None:
        """Wrap the package's renderer `inner` for the tokenizer."""
        self._tokenizer = tokenizer
        self._inner = inner
        self.config = inner.config
        self.vocabulary = Vocabulary(tokenizer)
        self.stop_ids = tuple(inner.get_stop_token_ids())
        self.reasons = self._opens_reasoning() or shows_reasoning(self._shown)

    @cached_property
    def unseen(self) -> Unseen:  # type: ignore[override]  # asked of the template when it is first needed
        """Return the roles and keys of messages that the template omits."""
        return unseen_of(self._rendered)

    def _rendered(self, messages: Sequence[ChatMessage]) -> list[int] | None:
        """Return the ids of messages from `render`, or None if the renderer refuses them."""
        try:
            ids: list[int] = self.render(messages).ids.tolist()
        except (TemplateError, KeyError, TypeError, ValueError):
            return None
        return ids

    def render(self, messages: Sequence[ChatMessage], tools: Tools = (), room: int | None = None) -> TokenSequence:
        """Return the prompt of a conversation, int32 [P]. See `Renderer.render`."""
        self._check_capacity(messages, room)
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
        """Return the tokens, int32 [N], after a call's prompt and completion. See `Renderer.extend`.

        None: the package has no bridge for these messages, or its bridge would change earlier ids.
        """
        self._check_capacity(new_messages, room)
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
        """Return the message of a completion, int32 [C], as the package parses it. See `Renderer.parse`."""
        return reply_of(*self._read(completion_ids, prompt_ids, tools), call_ids)

    def _call_format(self) -> CallFormat:
        if self._found_format is None:
            raise NotInThisFormat("calls can't be constrained")
        return self._found_format

    @cached_property
    def _found_format(self) -> CallFormat | None:
        """Return how the template writes calls; None: not certain, or replies are not parsed as such calls."""
        return find_call_format(self._probe_reply, self.vocabulary.decode, self.vocabulary.added)

    def _probe_reply(self, calls: int) -> list[int] | None:
        """Return the ids of a reply with a number of calls, without its end; None: it is parsed otherwise."""
        messages = probe_reply(calls)
        prompt, whole = self._shown(Probe(messages[:-1], PROBE_TOOLS)), self._shown(Probe(messages, PROBE_TOOLS), False)
        if prompt is None or whole is None or whole[: len(prompt)] != prompt:
            return None
        ids = whole[len(prompt) :]
        end = next((k for k, token in enumerate(ids) if token in self.stop_ids), len(ids))
        reply = np.asarray(ids[:end], np.int32)
        _, content, attempts = self._read(reply, lambda: np.asarray(prompt, np.int32), PROBE_TOOLS)
        wanted = [tool["function"]["name"] for tool in PROBE_TOOLS[:calls]]
        good = [a.name for a in attempts if a.problem is None and json.loads(a.arguments or "") == {"probe": 1}]
        return ids[:end] if good == wanted and len(attempts) == calls and not content else None

    def _check_capacity(self, messages: Sequence[ChatMessage], room: int | None) -> None:
        """Raise TooManyTokens for messages that fit with no template: each writes the users' text."""
        said = [message.text.strip() for message in messages if message.role == "user"]
        if room is not None and sum(map(len, said)) > PIECE:
            fewest = self.vocabulary.long_text.fewest("".join(said))
            if fewest > room:
                raise TooManyTokens(fewest)

    def _read(
        self, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools
    ) -> tuple[str | None, str, list[Attempt]]:
        """Return reasoning (or None), content and tool calls of a reply [C], as the package parses them."""
        ids = completion_ids.tolist()
        try:
            parsed = self._inner.parse_response(ids, tools=_given(tools), prompt_ids=prompt_ids().tolist())
        except RecursionError:  # a model can write JSON that is nested too deep for the package
            end = next((k for k, token in enumerate(ids) if token in self.stop_ids), len(ids))
            text = self._tokenizer.decode(ids[:end])
            return None, text, [Attempt(text=text, problem="it is nested too deep")] if tools else []
        attempts = [_attempt(call) for call in parsed.tool_calls]
        text = [a.text for a in attempts if a.problem is not None or not tools]
        content = "\n".join([parsed.content, *text] if parsed.content else text)
        return parsed.reasoning_content or None, content, attempts if tools else []

    def _opens_reasoning(self) -> bool:
        """Return whether the prompt ends with the start of reasoning."""
        ids = self._shown(PLAIN[0])
        return ids is not None and str(self._tokenizer.decode(ids[-16:])).rstrip().endswith("<think>")

    def _shown(self, probe: Probe, ask: bool = True) -> list[int] | None:
        """Return the ids of a conversation, or None if the renderer refuses it; `ask`: a reply begins after it."""
        messages, tools = list(probe.messages), list(probe.tools) or None
        try:
            return list(self._inner.render_ids(messages, tools=tools, add_generation_prompt=ask))
        except (TemplateError, KeyError, TypeError, ValueError):
            return None

    def _guarded(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> tuple[Any, Any, Any]:
        """Return the renderer to use, and the messages and tools to give to it."""
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
            return self._inner, messages, tools  # only an edge of a text resembles a control token
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
        """Return the same renderer with a tokenizer that understands marks, or None if impossible."""
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return None
        from renderers import create_renderer

        return create_renderer(_MarkedTokenizer(self._tokenizer, self._control), self.config)


def _attempt(call: Any) -> Attempt:
    """Return a call, well-formed or not, as the package has parsed it."""
    if call.status != "ok" or not call.name:
        return Attempt(text=call.raw, problem=str(call.status))
    arguments = _arguments(call.raw, call.arguments)
    problem = None if arguments is not None else "its arguments are not a JSON object"
    return Attempt(text=call.raw, name=call.name, arguments=arguments, problem=problem)


def _arguments(raw: str, value: Any) -> str | None:
    """Return a call's arguments as the model wrote them, or else their value as JSON. None: they are not an object."""
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
    except (ValueError, RecursionError):
        return None


def _given(tools: Tools) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None


def _names(called: Sequence[str], answers: Sequence[ChatMessage]) -> dict[str, str]:
    """Return the names of tools by the ids of their calls; `reply_of` ends the id of call k with `_k`."""
    ids = [m.tool_call_id for m in answers if m.tool_call_id is not None]
    numbers = {call: call.rpartition("_")[2] for call in ids}
    return {call: called[int(k)] for call, k in numbers.items() if k in {str(i) for i in range(len(called))}}


def _dicts(messages: Sequence[ChatMessage], names: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return messages in the package's form. Tool results get the tools' names, which some formats show."""
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
    """A tokenizer that encodes marked strings as `ControlText` does, and otherwise behaves like the one it wraps."""

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
        text = template_text(self._tokenizer, messages, **options | {"tokenize": False})
        return self._control.encode(text)[0]


def _marked(value: Any, control: ControlText) -> Any:
    """Return the value with marks in all of its strings, or the value itself if no string needs one."""
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
    """Return the first control token that a string in the value spells, or None."""
    if isinstance(value, str):
        return control.find(value)
    if isinstance(value, Mapping):
        return _found([*value, *value.values()], control)
    if isinstance(value, Sequence):
        return next((name for inner in value if (name := _found(inner, control)) is not None), None)
    return None
