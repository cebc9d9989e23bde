"""What jobs and a base server tell each other about models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palestra.config import AdapterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseDescription:
    """What a job needs to know about a base server's model to write prompts and parse replies.

    Attributes:
        max_context: largest prompt and reply together that fit into the engine's memory, in tokens.
        deterministic: whether samples and weights are the same bit by bit whatever else is computed.
        tokenizer: the tokenizer's files by name, each uint8 [bytes].
        tokenizer_name: origin of the tokenizer, to select a renderer.
    """

    model: str
    vocab_size: int
    max_positions: int
    max_context: int
    dtype: str
    trainer_dtype: str
    deterministic: bool
    tokenizer: Mapping[str, NDArray[np.uint8]]
    tokenizer_name: str
    numerics: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSpec:
    """The sampling weights of a policy.

    Attributes:
        model: the base, or the folder of an adapter of it.
        adapter: the trained adapter, whose every version the engine gets. None: not trained; the weights are those of
            `model`.
    """

    model: str
    adapter: AdapterConfig | None = None
