"""Detects a server with another tokenizer, by comparing the tokens of a short text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from palestra.engine.base import SAMPLE_TEXT
from palestra.errors import ConfigError, InvalidRequest
from palestra_engines.external.connection import EngineConnection

OTHER_MODEL = "start it with the policy's model, or correct engine.url or the policy's model"  # what to do


@dataclass(frozen=True, slots=True)
class SampleText:
    """A text, and its tokens in the policy's tokenizer.

    Attributes:
        ids: without special tokens.
    """

    text: str
    ids: tuple[int, ...]


def tokenized(tokenizer: Any) -> SampleText:
    """Return the sample text with the tokens of a transformers tokenizer."""
    return SampleText(SAMPLE_TEXT, tuple(map(int, tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False))))


async def check_tokenizer(http: EngineConnection, sample: SampleText, seconds: float) -> None:
    """Compare a server's tokens of the sample text; vLLM and SGLang have the same route for that."""
    try:
        found = await http.post("/tokenize", {"prompt": sample.text, "add_special_tokens": False}, seconds)
    except InvalidRequest:
        return  # a server that was started without a tokenizer, which can't be another one
    said = found.get("tokens") if isinstance(found, dict) else None
    if said != list(sample.ids):
        shown = f"{len(said)} other tokens" if isinstance(said, list) else "no tokens"
        raise ConfigError(
            f"the engine's server has another tokenizer than the policy's model: it makes {shown} of a text of "
            f"{len(sample.ids)}; {OTHER_MODEL}"
        )
