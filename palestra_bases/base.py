"""What a base server is given: one model, and an engine and a trainer over it."""

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
    """What a job has to know of a base server's model to write prompts and read replies.

    Attributes:
        model: the base, as its operator has named it.
        vocab_size: number of tokens, V.
        max_positions: most positions of the model.
        max_context: most tokens of prompt and reply together that fit into the engine's memory.
        dtype: precision of the engine's products.
        trainer_dtype: precision of the trainer's products.
        deterministic: whether samples and weights are the same bit by bit whatever is computed beside them.
        tokenizer: the tokenizer's files by name, each uint8 [bytes].
        tokenizer_name: what the tokenizer was loaded from, by which a renderer may be found.
        numerics: what computes there; see `palestra.models.numerics`.
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
    """What a policy is sampled from.

    Attributes:
        model: the base, or the folder of an adapter of it.
        adapter: what is trained; the engine then gets the weights of every version. None: nothing is, so that the
            weights are those of `model`.
    """

    model: str
    adapter: AdapterConfig | None = None


class SharedBase(Protocol):
    """A model whose own weights never change, with the engine and the trainer that all jobs of a base server share."""

    @property
    def description(self) -> BaseDescription:
        """Return what a job has to know of the model."""
        ...

    def parts_of(self, tenant: str) -> tuple[Engine, Trainer]:
        """Return the engine and the trainer as one tenant uses them; policies have full names there."""
        ...

    def folder_of(self, tenant: str) -> Path:
        """Return the folder in which all files of a tenant's jobs are; it is absolute, without symbolic links."""
        ...

    def own_folder(self) -> Path | None:
        """Return the server's own folder, into which nothing is written for jobs; None: it has none."""
        ...

    async def sample(self, name: str, spec: SamplerSpec) -> None:
        """Give the engine one more policy, of version 0.0.

        Raises:
            ConfigError: the model is another base, or the adapter does not fit.
            ModelError: an adapter's files are missing or damaged.
        """
        ...

    def is_base(self, model: str) -> bool:
        """Return whether a model is the base itself."""
        ...

    def check(self, spec: PolicySpec) -> None:
        """Look whether the trainer may have a policy.

        Raises:
            ConfigError: a model is of another base, and the message names both; or there is no adapter to train.
        """
        ...

    async def remove(self, tenant: str) -> None:
        """Forget a tenant in the trainer, with its policies; requests of it fail, also those that are computed."""
        ...

    async def failure(self) -> str:
        """Return when engine or trainer can't continue, and say why."""
        ...
