"""The interface of another project's server: `VllmApi`, `SglangApi`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from palestra.engine.base import EngineRequest
from palestra.types.calls import PolicyVersion, TokenSequence, VersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A part of a reply from a server, not validated yet.

    Attributes:
        ids: new tokens.
        top: for each token, (token, logprob) of the most probable ones; (): not requested.
        finish: why the reply is over; None: there is more.
        versions: with the last chunk, which weights sampled the whole reply; None: the server does not report it.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: str | None = None
    versions: tuple[VersionSpan, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """A server's own figures.

    Attributes:
        kv_share: used fraction of its key-value memory, 0 to 1.
        prefilled_tokens: computed prompt tokens so far.
    """

    kv_share: float = 0.0
    prefilled_tokens: int = 0
    passes: int = 0


class EngineApi(Protocol):
    """The routes of one server, which samples from one model.

    Every method raises EngineFailure if the server cannot be reached, or its answer is invalid.

    Attributes:
        splits_versions: whether one reply may be sampled from several known versions of the weights.
        sees: whether prompts may have pictures.
    """

    splits_versions: bool
    sees: bool

    async def inspect(self, dtype: torch.dtype) -> None:
        """Compare the server's description with the policy's needs, without disturbing jobs that use it. Weights are
        sent to it in `dtype`. Raises ConfigError: it does not fit; the message says what to change.
        """
        ...

    async def check(self, dtype: torch.dtype) -> None:
        """Do the same as `inspect`, resume a paused server, and test it.

        A killed job may have left it paused. Raises ConfigError: it does not fit; the message says what to change.
        """
        ...

    def generate(self, request: EngineRequest, adapter: str | None) -> AsyncIterator[Chunk]:
        """Stream a reply. Closing the iterator cancels it at the server.

        `adapter` names a loaded one, whose replies name no versions; None: the server's own weights. Raises
        InvalidRequest: the server does not support the request.
        """
        ...

    async def score(self, prompt: TokenSequence, adapter: str | None) -> list[float]:
        """Return the log-probability of each of P tokens but the first, see `Engine.score`: [P - 1]. `adapter` names a
        loaded one; None: the server's own weights. Raises InvalidRequest: the server cannot read the prompt.
        """
        ...

    async def pause(self) -> None:
        """Wait until no forward pass runs; replies are kept."""
        ...

    async def resume(self) -> None:
        """Allow forward passes again."""
        ...

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        """Replace all weights of the paused server, and drop everything computed with the old ones. `path` is a
        safetensors file, in a folder with further files that the server needs.
        """
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter in addition to others, while the server keeps sampling. `name` was never used before at the
        server; `folder` is in PEFT's format, and must exist until the adapter is unloaded.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Free the memory of an unused adapter."""
        ...

    async def set_version(self, version: PolicyVersion) -> None:
        """Set the version of weights that the server has loaded itself."""
        ...

    async def counters(self) -> Counters:
        """Read the server's figures; it answers only if it works."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
