"""Renderers of the `renderers` package, with messages whose text is never a control token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from palestra.chat.control_text import ControlText, control_tokens
from palestra.chat.probes import PLAIN, Probe, shows_reasoning
from palestra.errors import ControlTokenInText, InvalidRequest

# Its library (harmony) encodes each text without control tokens, and with a vocabulary of its own: marks would stay.
_SAFE = frozenset({"gpt-oss"})


class PackageRenderer:
    """A renderer of the package. Text that spells a control token becomes ordinary tokens, or is refused.

    Messages without such text take the package's own way, untouched.
    """

    def __init__(self, tokenizer: Any, inner: Any) -> None:
        """`inner`: made by the package for `tokenizer`, one of transformers."""
        self._tokenizer = tokenizer
        self._inner = inner
        self.config = inner.config
        self.reasons = self._opens_reasoning() or shows_reasoning(self._shown)

    def render_ids(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the ids of a whole conversation.

        Raises:
            ControlTokenInText: a text spells a control token, and this renderer cannot write it as text.
        """
        renderer, given, offered = self._guarded(messages, tools)
        return list(renderer.render_ids(given, tools=offered, add_generation_prompt=add_generation_prompt))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
    ) -> Any:
        """Return what extends a conversation; None where the package has no bridge. See `render_ids` for errors."""
        renderer, given, offered = self._guarded(new_messages, tools)
        return renderer.bridge_to_next_turn(previous_prompt_ids, previous_completion_ids, given, tools=offered)

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Any:
        """Return text, reasoning and tool calls of a reply, as the package reads it."""
        return self._inner.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens that end a reply."""
        return list(self._inner.get_stop_token_ids())

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
        return ControlText(control_tokens(backend, self.get_stop_token_ids()), backend)

    @cached_property
    def _marking(self) -> Any | None:
        """The same renderer with a tokenizer that understands marks; None: there can be none."""
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return None
        from renderers import create_renderer

        return create_renderer(_MarkedTokenizer(self._tokenizer, self._control), self.config)


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
