"""Selection of a model's renderer: by the model's name, or by comparing ids with the model's own template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from palestra.extensions import extensions, load_extension
from palestra.renderers.base import Renderer
from palestra.renderers.chatml import ChatMLConfig, ChatMLRenderer
from palestra.renderers.dialog import IDEFICS, LLAVA, DialogRenderer
from palestra.renderers.package import PackageRenderer
from palestra.renderers.picture_layout import PictureTokens
from palestra.renderers.probes import (
    PICTURED,
    PLAIN,
    REASONING,
    TOOLS,
    WITH_TOOLS,
    Probe,
    as_agents_send,
    shows_reasoning,
    template_text,
)


class _Candidate(NamedTuple):
    """A renderer to try: a `ChatMLRenderer`, or one of the package."""

    made: Any
    show: Callable[[Probe], Sequence[int]]  # returns the ids of a conversation


def select_renderer(tokenizer: Any, keep_reasoning: bool = False, pictures: PictureTokens | None = None) -> Renderer:
    """Return the renderer for a model: that of an installed package (`palestra.renderers`) which knows it, or ours.

    With `keep_reasoning` a conversation keeps the reasoning of earlier replies even if the model's template drops it
    after the next user message; `ChatMLRenderer` always keeps it. Without `pictures` the model reads text only.
    """
    for point in extensions("palestra.renderers").values():
        own: Renderer | None = load_extension(point)(tokenizer, pictures)
        if own is not None:
            return own
    if pictures is not None and (seeing := _seeing(tokenizer, pictures)) is not None:
        return seeing
    found = _select(tokenizer)
    if isinstance(found, ChatMLRenderer):
        return found
    from renderers import create_renderer

    config: Any = found.config
    if keep_reasoning and hasattr(config, "thinking_retention"):
        found = create_renderer(tokenizer, config.model_copy(update={"thinking_retention": "all"}))
    return PackageRenderer(tokenizer, found)


def _seeing(tokenizer: Any, pictures: PictureTokens) -> Renderer | None:
    """Return a renderer with pictures whose ids equal the template's, or None; the cheap ending is compared first."""
    if not isinstance(getattr(tokenizer, "chat_template", None), str):
        return None
    makers: tuple[Callable[[Any, PictureTokens], Renderer | None], ...] = (_idefics, _llava, _chatml)
    marked = pictures.as_marked()
    for make in makers:
        with suppress(ValueError):  # the tokenizer lacks a control token of the format
            made = make(tokenizer, marked)
            if made is not None and all(_shows_alike(tokenizer, made, probe) for probe in PICTURED):
                return make(tokenizer, pictures)
    return None


def _idefics(tokenizer: Any, pictures: PictureTokens) -> DialogRenderer | None:
    """Return a renderer of Idefics3's dialogs, with the template's first token."""
    shown = _text(tokenizer, PICTURED[0])
    if shown is None or not shown.endswith(IDEFICS.opening):
        return None
    first = re.match(r".*?(?=User:|System:)", shown, re.DOTALL)
    begin = [] if first is None else tokenizer.encode(first[0], add_special_tokens=False)
    return DialogRenderer(tokenizer, pictures, IDEFICS, begin)


def _llava(tokenizer: Any, pictures: PictureTokens) -> DialogRenderer | None:
    """Return a renderer of Llava's dialogs, with the tokenizer's first token."""
    shown = _text(tokenizer, PICTURED[0])
    if shown is None or not shown.endswith(LLAVA.opening):
        return None
    return DialogRenderer(tokenizer, pictures, LLAVA, tokenizer.encode(""))


def _chatml(tokenizer: Any, pictures: PictureTokens) -> ChatMLRenderer | None:
    """Return a ChatML renderer with the template's settings; None: the template writes texts differently."""
    if _text(tokenizer, PLAIN[0]) is None:
        return None
    made = ChatMLRenderer(tokenizer, _config(tokenizer), pictures)
    candidate = _Candidate(made, lambda probe: made.render(as_agents_send(probe), probe.tools).ids.tolist())
    return made if all(_agree(tokenizer, candidate, probe) for probe in _probes(tokenizer)) else None


def _shows_alike(tokenizer: Any, made: Renderer, probe: Probe) -> bool:
    """Return whether a renderer gives the ids that a processor makes of the template's text."""
    shown = _text(tokenizer, probe)
    if shown is None:
        return False
    # A processor leaves out the token with which its tokenizer begins, if the template has written it.
    begun = tokenizer.bos_token is not None and shown.startswith(tokenizer.bos_token)
    wanted: list[int] = tokenizer.encode(shown, add_special_tokens=not begun)
    found: list[int] = made.render(as_agents_send(probe)).ids.tolist()
    return found == wanted


def _select(tokenizer: Any) -> Any:
    """Choose a renderer: a `ChatMLRenderer`, or an unwrapped one of the package.

    In this order: the package's renderer for the model's name; `ChatMLRenderer`, if its ids equal those of the model's
    template on the probe conversations; another renderer of the package with equal ids (a model in a folder has no
    known name); the template itself, which has no bridge.

    Conversations with tools are only compared if the template supports tools; otherwise `ChatMLRenderer` follows the
    convention of Hermes and Qwen. The same holds for reasoning.
    """
    from renderers import DefaultRendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    if getattr(tokenizer, "name_or_path", None) in MODEL_RENDERER_MAP:
        return create_renderer(tokenizer)
    if isinstance(getattr(tokenizer, "chat_template", None), str) and _text(tokenizer, PLAIN[0]) is not None:
        probes = _probes(tokenizer)
        for candidate in _candidates(tokenizer):
            if all(_agree(tokenizer, candidate, probe) for probe in probes):
                return candidate.made
    return create_renderer(tokenizer, DefaultRendererConfig())


def _probes(tokenizer: Any) -> list[Probe]:
    """Return the probe conversations that the template can show."""
    tools = _has_place_for_tools(tokenizer)
    probes = [*PLAIN, *(WITH_TOOLS if tools else ())]
    if shows_reasoning(lambda probe: _text(tokenizer, probe)):
        probes += [probe for probe in REASONING if tools or not probe.tools]
    return probes


def _candidates(tokenizer: Any) -> Iterator[_Candidate]:
    """Yield `ChatMLRenderer`, then the package's renderers whose control tokens the tokenizer has."""
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    with suppress(ValueError):  # no ChatML tokens
        ours = ChatMLRenderer(tokenizer, _config(tokenizer))
        yield _Candidate(ours, lambda probe: ours.render(as_agents_send(probe), probe.tools).ids.tolist())
    for name in dict.fromkeys(MODEL_RENDERER_MAP.values()):
        if name == "gpt-oss":  # it would fetch a vocabulary from the network
            continue
        with suppress(AssertionError, ValueError, TypeError):  # raised if the tokenizer lacks a token
            made = create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python({"name": name}))
            yield _Candidate(made, partial(_show, made))


def _show(made: Any, probe: Probe) -> list[int]:
    """Return the ids that a renderer of the package makes of a conversation."""
    return list(made.render_ids(list(probe.messages), tools=list(probe.tools) or None, add_generation_prompt=True))


def _config(tokenizer: Any) -> ChatMLConfig:
    alone = _text(tokenizer, Probe([{"role": "user", "content": "Hi."}])) or ""
    head, close, _ = alone.partition("<|im_end|>")
    system = head.removeprefix("<|im_start|>system\n") if close and head.startswith("<|im_start|>system\n") else None
    developed = _text(tokenizer, Probe([{"role": "developer", "content": "Hi."}])) or ""
    return ChatMLConfig(
        default_system=system,
        developer="developer" if "<|im_start|>developer\nHi.<|im_end|>" in developed else "system",
        reasons=shows_reasoning(lambda probe: _text(tokenizer, probe)),
    )


def _has_place_for_tools(tokenizer: Any) -> bool:
    """Return whether the template shows tools, calls or results, beyond a result's role `tool`."""
    asked = {"role": "user", "content": "Hi."}
    called = {"role": "assistant", "content": "", "tool_calls": WITH_TOOLS[1].messages[1]["tool_calls"]}
    result = {"role": "tool", "content": "sunny"}
    pairs = [
        (Probe([asked], TOOLS), Probe([asked])),
        (Probe([asked, called, asked]), Probe([asked, {"role": "assistant", "content": ""}, asked])),
    ]
    if any(_text(tokenizer, a) != _text(tokenizer, b) for a, b in pairs):
        return True
    shown = _text(tokenizer, Probe([asked, result]))
    return shown is not None and "<|im_start|>tool\nsunny<|im_end|>" not in shown


def _text(tokenizer: Any, probe: Probe) -> str | None:
    """Return the template's text of a conversation, or None if it refuses it."""
    from jinja2 import TemplateError

    try:
        text: str = template_text(
            tokenizer, list(probe.messages), tools=list(probe.tools) or None, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError):
        return None
    return text


def _agree(tokenizer: Any, candidate: _Candidate, probe: Probe) -> bool:
    """Return whether candidate and template give the same ids, or the template refuses the conversation."""
    if _text(tokenizer, probe) is None:
        return True
    wanted: Sequence[int] = template_text(
        tokenizer,
        list(probe.messages),
        tools=list(probe.tools) or None,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    try:
        found = candidate.show(probe)
    except (KeyError, TypeError, ValueError):  # the template can show this, and the renderer can't
        return False
    return list(wanted) == list(found)
