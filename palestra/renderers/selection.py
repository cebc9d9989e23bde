"""Selection of a model's renderer: by the model's name, or by comparing ids with the model's own template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from palestra.renderers.base import Renderer
from palestra.renderers.chatml import ChatMLConfig, ChatMLRenderer
from palestra.renderers.dialog import DialogRenderer
from palestra.renderers.package import PackageRenderer
from palestra.renderers.picture_tokens import PictureTokens
from palestra.renderers.probes import PLAIN, REASONING, TOOLS, WITH_TOOLS, Probe, messages_of, shows_reasoning


class _Candidate(NamedTuple):
    """A renderer to try: a `ChatMLRenderer`, or one of the package."""

    made: Any
    show: Callable[[Probe], Sequence[int]]  # returns the ids of a conversation


def select_renderer(tokenizer: Any, keep_reasoning: bool = False, pictures: PictureTokens | None = None) -> Renderer:
    """Return the renderer for a model.

    Args:
        tokenizer: the model's tokenizer, of transformers.
        keep_reasoning: whether a conversation keeps the reasoning of earlier replies even if the model's template drops
            it when the user speaks again. `ChatMLRenderer` always keeps it.
        pictures: writes the placeholders of pictures; None: the model reads text only.
    """
    if pictures is not None:
        seeing = _dialog(tokenizer, pictures) or _chatml(tokenizer, pictures)
        if seeing is not None:
            return seeing
    found = _select(tokenizer)
    if isinstance(found, ChatMLRenderer):
        return found
    from renderers import create_renderer

    config: Any = found.config
    if keep_reasoning and hasattr(config, "thinking_retention"):
        found = create_renderer(tokenizer, config.model_copy(update={"thinking_retention": "all"}))
    return PackageRenderer(tokenizer, found)


def _dialog(tokenizer: Any, pictures: PictureTokens) -> DialogRenderer | None:
    """Return the renderer of Idefics3's dialogs, if it gives the ids of the model's own template; else None.

    Such a template takes lists of parts alone. Conversations have no picture here, because only a processor, which the
    template is not, would write its placeholders.
    """
    probes = [probe.messages for probe in PLAIN]
    parts = [[{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages] for messages in probes]
    shown = [_text(tokenizer, Probe(messages)) for messages in parts]
    if not all(text is not None and text.endswith("Assistant:") for text in shown):
        return None
    first = re.match(r".*?(?=User:|System:)", shown[0] or "", re.DOTALL)
    try:
        made = DialogRenderer(tokenizer, pictures, "" if first is None else first[0])
    except ValueError:
        return None
    for messages, text in zip(probes, shown, strict=True):
        if made.render(messages_of(Probe(messages))).ids.tolist() != tokenizer.encode(text, add_special_tokens=False):
            return None
    return made


def _chatml(tokenizer: Any, pictures: PictureTokens) -> ChatMLRenderer | None:
    """Return the renderer of ChatML with pictures, if it gives the ids of the model's own template; else None.

    The package's renderers for names that it knows are not asked: those that take pictures load a processor, and read
    the pixels themselves.
    """
    if not isinstance(getattr(tokenizer, "chat_template", None), str) or _text(tokenizer, PLAIN[0]) is None:
        return None
    if not _has_place_for_pictures(tokenizer, pictures.layout.marker):
        return None
    try:
        made = ChatMLRenderer(tokenizer, _config(tokenizer), pictures)
    except ValueError:  # no ChatML tokens
        return None
    candidate = _Candidate(made, lambda probe: made.render(messages_of(probe), probe.tools).ids.tolist())
    return made if all(_agree(tokenizer, candidate, probe) for probe in _probes(tokenizer)) else None


def _has_place_for_pictures(tokenizer: Any, marker: str) -> bool:
    """Return whether the template writes a picture between the texts beside which it stands; `marker` is what it writes."""
    parts = [{"type": "text", "text": "One."}, {"type": "image"}, {"type": "text", "text": "Two."}]
    shown = _text(tokenizer, Probe([{"role": "user", "content": parts}]))
    return shown is not None and f"\nOne.{marker}Two.<|im_end|>" in shown


def _select(tokenizer: Any) -> Any:
    """Choose a renderer: a `ChatMLRenderer`, or an unwrapped one of the package.

    The choices, in order: the package's renderer for the model's name; `ChatMLRenderer`, if it gives exactly the ids of
    the model's own template on the probe conversations; another renderer of the package of which that is true (a model
    in a folder has no name to be found by); the template itself, which has no bridge.

    If a template has no place for tools, conversations with tools are not compared: `ChatMLRenderer` then follows the
    convention of Hermes and Qwen. If it has one, the formats must agree. The same holds for reasoning.
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
    """Yield `ChatMLRenderer`, then the package's renderers for whose control tokens the tokenizer has ids."""
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    with suppress(ValueError):  # no ChatML tokens
        ours = ChatMLRenderer(tokenizer, _config(tokenizer))
        yield _Candidate(ours, lambda probe: ours.render(messages_of(probe), probe.tools).ids.tolist())
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
    """Return the text that the template makes of a conversation, or None if it refuses it."""
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            list(probe.messages), tools=list(probe.tools) or None, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError):
        return None
    return text


def _agree(tokenizer: Any, candidate: _Candidate, probe: Probe) -> bool:
    """Return whether candidate and template give the same ids, or the template refuses the conversation."""
    if _text(tokenizer, probe) is None:
        return True
    wanted: Sequence[int] = tokenizer.apply_chat_template(
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
