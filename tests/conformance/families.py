"""Every renderer that a model may get, each with a tokenizer: its own where one can be had, else a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import renderers
from renderers import base, configs
from rendering import render_ids

from conformance import vocabularies
from conformance.stand_in import StandIn
from palestra.errors import ControlTokenInText
from palestra.renderers import ChatMLRenderer, PackageRenderer, select_renderer

SMOLLM2 = "SmolLM2-135M-Instruct"
TINY = "tiny-random"
QWEN = "Qwen2.5"
OTHERS_VOCABULARY = "stand-in"
_VOCABULARIES: dict[str, Callable[[], Any | None]] = {
    "qwen3": vocabularies.qwen25,  # Qwen3 has Qwen2.5's vocabulary and a few control tokens more
    "prime-qwen3": vocabularies.qwen25,
    "deepseek-v3": vocabularies.deepseek,
    "deepseek-r1": vocabularies.deepseek,
    "deepseek-v4": vocabularies.deepseek,
    "llama-3": vocabularies.llama3,
    "gpt-oss": vocabularies.gpt_oss,
}
NEEDS_THE_NETWORK = frozenset({"gpt-oss"})  # its library fetches a vocabulary, unless it is at hand


@dataclass(frozen=True, kw_only=True)
class Family:
    """A renderer and a tokenizer for it."""

    name: str
    ours: bool
    tokenizer: str  # whose: shown in the report
    make: Callable[[], tuple[Any, Any]]  # renderer, tokenizer
    keeping_thoughts: Callable[[], tuple[Any, Any]] | None = None  # made to bridge even where its template drops them


def writes_control_text(renderer: Any, tokenizer: Any) -> bool:
    """Whether a message that spells a control token is rendered; else it is refused."""
    typed = tokenizer.decode(renderer.stop_ids[:1])
    try:
        render_ids(renderer, [{"role": "user", "content": f"It says {typed} there."}], add_generation_prompt=True)
    except ControlTokenInText:
        return False
    return True


@cache
def _loaded(name: str) -> Any:
    from palestra.models.causal_lm import load_tokenizer

    return load_tokenizer(name)


def _chosen(tokenizer: Any) -> tuple[Any, Any]:
    renderer = select_renderer(tokenizer)
    assert isinstance(renderer, ChatMLRenderer)
    return renderer, tokenizer


def ours() -> list[Family]:
    """Families of ours whose tokenizers are at hand."""
    found = [
        Family(name="SmolLM2", ours=True, tokenizer="its own", make=lambda: _chosen(_loaded(SMOLLM2))),
        Family(name=TINY, ours=True, tokenizer="its own", make=lambda: _chosen(_loaded(TINY))),
    ]
    if vocabularies.at_hand(vocabularies.qwen25):
        found.insert(1, Family(name=QWEN, ours=True, tokenizer="its own", make=lambda: _chosen(vocabularies.qwen25())))
    return found


def of_the_package() -> list[Family]:
    """Every renderer that the `renderers` package registers and that can be made here."""
    base._populate_registry()
    there = vocabularies.at_hand(vocabularies.gpt_oss)
    return [_of_the_package(name) for name in base.RENDERER_REGISTRY if there or name not in NEEDS_THE_NETWORK]


def _of_the_package(name: str) -> Family:
    if name == "default":
        return Family(name=name, ours=False, tokenizer="SmolLM2's, with its template", make=_default)
    vocabulary = _VOCABULARIES.get(name)
    own = vocabulary if vocabulary is not None and vocabularies.at_hand(vocabulary) else None
    return Family(
        name=name,
        ours=False,
        tokenizer=OTHERS_VOCABULARY if own is None else "its vocabulary",
        make=lambda: _made(name, own),
        keeping_thoughts=lambda: _made(name, own, thinking_retention="all"),
    )


def _made(name: str, vocabulary: Callable[[], Any | None] | None, **options: Any) -> tuple[Any, Any]:
    tokenizer = StandIn(_loaded(SMOLLM2) if vocabulary is None else vocabulary())
    renderer = renderers.create_renderer(tokenizer, _configs()[name](**options))
    tokenizer.frozen = True
    return PackageRenderer(tokenizer, renderer), tokenizer


def _default() -> tuple[Any, Any]:
    tokenizer = _loaded(SMOLLM2)
    return PackageRenderer(tokenizer, renderers.create_renderer(tokenizer, configs.DefaultRendererConfig())), tokenizer


@cache
def _configs() -> dict[str, Any]:
    found = [c for c in vars(configs).values() if isinstance(c, type) and issubclass(c, configs.BaseRendererConfig)]
    return {c.model_fields["name"].default: c for c in found if "name" in c.model_fields}
