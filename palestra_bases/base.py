"""Interface of a base server's model, engine and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from palestra.config import AdapterConfig
from palestra.engine.base import Engine
from palestra.trainer.base import PolicySpec, Trainer


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


class SharedBase(Protocol):
    """A frozen model, with the engine and the trainer that all jobs of a base server share."""

    @property
    def description(self) -> BaseDescription:
        """Return the description of the model."""
        ...

    def parts_of(self, tenant: str) -> tuple[Engine, Trainer]:
        """Return the engine and the trainer for one tenant; policies have full names there."""
        ...

    def folder_of(self, tenant: str) -> Path:
        """Return the folder for all files of a tenant's jobs, absolute and without symbolic links."""
        ...

    def own_folder(self) -> Path | None:
        """Return the server's own folder, which jobs cannot write to, or None."""
        ...

    async def sample(self, name: str, spec: SamplerSpec) -> None:
        """Add a policy of version 0.0 to the engine. Raises ConfigError if the model is another base, or the adapter
        does not fit. Raises ModelError if an adapter's files are missing or damaged.
        """
        ...

    def is_base(self, model: str) -> bool:
        """Return whether a model is the base itself."""
        ...

    def check(self, spec: PolicySpec) -> None:
        """Check whether the trainer may have a policy. Raises ConfigError if a model has another base, which
        the message names, or if there is no adapter to train.
        """
        ...

    async def remove(self, tenant: str) -> None:
        """Remove a tenant with its policies from the trainer; its requests fail, even running ones."""
        ...

    async def failure(self) -> str:
        """Wait until engine or trainer fails, and return the reason."""
        ...
