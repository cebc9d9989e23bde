"""What Palestra asks of the server of another project, whichever it is: `VllmApi`, `SglangApi`."""

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
    """A piece of a reply as a server has sent it, of which nothing is believed yet.

    Attributes:
        ids: new tokens.
        logprobs: of each of them.
        top: for each pairs (token, logprob) of the most probable ones; (): not requested.
        finish: why the reply is over; None: there is more.
        versions: with the last chunk, which weights have sampled the tokens of the whole reply; None: the server does
            not say.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: str | None = None
    versions: tuple[VersionSpan, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What a server says of itself.

    Attributes:
        kv_share: of its memory for keys and values that is in use, 0 to 1.
        prefilled_tokens: prompt tokens that were computed so far.
        passes: forward passes so far.
    """

    kv_share: float = 0.0
    prefilled_tokens: int = 0
    passes: int = 0


class EngineApi(Protocol):
    """The routes of one server, which samples from one model.

    Every method raises EngineFailure where the server can't be reached, or answers with what can't be used.

    Attributes:
        splits_versions: whether one reply may be sampled from several versions of the weights, each of them known.
        sees: whether prompts may have pictures.
    """

    splits_versions: bool
    sees: bool

    async def inspect(self, dtype: torch.dtype) -> None:
        """Compare what the server says of itself with what the policy needs. A job that uses it notices nothing.

        Args:
            dtype: of the weights that it is given.

        Raises:
            ConfigError: it does not fit; the message says what to change.
        """
        ...

    async def check(self, dtype: torch.dtype) -> None:
        """Do what `inspect` does, let the server go on if it is paused, and try whether it is what it says.

        A job that was killed may have left it paused.

        Args:
            dtype: of the weights that it is given.

        Raises:
            ConfigError: it does not; the message says what to change.
        """
        ...

    def generate(self, request: EngineRequest, adapter: str | None) -> AsyncIterator[Chunk]:
        """Stream a reply. Closing the iterator cancels it at the server.

        Args:
            adapter: name of a loaded adapter, whose replies name no versions; None: the server's own weights.

        Raises:
            InvalidRequest: the server can't sample in this way; nothing was sampled.
        """
        ...

    async def score(self, prompt: TokenSequence, adapter: str | None) -> list[float]:
        """Return the log-probability of each of P tokens but the first, see `Engine.score`: [P - 1].

        Args:
            prompt: [P] tokens.
            adapter: name of a loaded adapter; None: the server's own weights.

        Raises:
            InvalidRequest: the server can't read the prompt.
        """
        ...

    async def pause(self) -> None:
        """Return when no forward pass runs; replies stay where they are."""
        ...

    async def resume(self) -> None:
        """Let forward passes run again."""
        ...

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        """Replace all weights of the paused server, and forget what the old ones have computed.

        Args:
            path: a safetensors file, or what the server needs beside it in the same folder.
        """
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter beside those that the server has; the server keeps sampling meanwhile.

        Args:
            name: that no adapter of the server has had.
            folder: in PEFT's format; it has to stay until the adapter is unloaded.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Free the memory of an adapter of which nothing is being sampled."""
        ...

    async def set_version(self, version: PolicyVersion) -> None:
        """Say which version the weights have that the server has loaded itself."""
        ...

    async def counters(self) -> Counters:
        """Ask the server how it is; it answers only if it can go on."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
