"""What every engine does: it samples tokens from the newest weights that each policy was given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from palestra.models.weights import WeightSource
from palestra.types.calls import PolicyVersion, SampledTokens, SamplingParams, TokenSequence


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineRequest:
    """One reply that an engine is asked for. Ids in, ids out: text is the session's."""

    policy: str
    prompt: TokenSequence  # [P] ids, at least one, with the images behind those that are placeholders
    sampling: SamplingParams  # temperature, limits, seed, grammar
    streamed: bool = True  # whether the caller reads token by token; otherwise several may come together


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoad:
    """One worker of a pool at this moment."""

    name: str
    state: str  # starting, ready, updating or draining
    requests: int  # that it is answering
    process: int | None  # number of its process; None: it is starting, or has none of this machine
    restarts: int  # how often another one had to be started in its place
    versions: Mapping[str, str]  # of the policies whose weights it was given, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """What an engine has to do at this moment, and what it has done since it was made."""

    waiting: int  # requests that have not begun
    running: int  # requests whose prompt or reply is being computed
    kv_bytes_used: int = 0  # keys and values: reserved by requests that have begun, or kept for prompts to come
    kv_bytes: int = 0  # the most that they may be; 0: the engine has none
    passes: int = 0  # forward passes so far
    prefilled_tokens: int = 0  # prompt tokens that were computed so far
    sampled_tokens: int = 0  # tokens that were sampled so far
    moved_bytes: int = 0  # of new weights that were broadcast to it so far
    workers: tuple[WorkerLoad, ...] = ()  # of a pool


class WorkerPool(Protocol):
    """What a pool of inference workers does, in addition to what every engine does."""

    async def scores(self, policy: str, prompt: TokenSequence) -> list[list[float]]:
        """Return what each worker that serves says of a prompt; see `Engine.score`."""
        ...

    async def resize(self, count: int) -> None:
        """Change the number of workers, and return when it is reached."""
        ...

    async def next_loss(self) -> str:
        """Return when a worker was lost, or does not start, and say why."""
        ...


class Engine(Protocol):
    """Samples tokens from the newest weights of each of its policies."""

    def generate(self, request: EngineRequest) -> AsyncIterator[SampledTokens]:
        """Stream a reply, which ends with a stop token or at `max_tokens`. Closing the iterator cancels the request.

        Raises:
            InvalidRequest: the engine can't answer such a request.
            EngineFailure: the reply could not be finished; nothing of it may be used.
            ReplyLost: its beginning came from a worker that died. A caller who has handed on nothing may ask again.
        """
        ...

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Return the log-probability of each token of a prompt but the first, given those before it: [P - 1].

        Those of temperature 1, among all tokens. Nothing is sampled.

        Args:
            prompt: [P] ids, at least one, with the images behind those that are placeholders.

        Raises:
            InvalidRequest: the engine can't answer such a request.
            EngineFailure: the engine was stopped, or has failed.
        """
        ...

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Replace a policy's weights, between two forward passes.

        What was computed with the older weights is not used for requests that begin later. Other policies keep theirs.

        Args:
            version: what tokens that are sampled from them say.
            source: where the engine reads the weights; it has read all of them when this returns.

        Raises:
            ModelError: the weights do not fit the policy's model, which then keeps what it had.
            EngineFailure: the engine was stopped, or has failed.
        """
        ...

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Let requests be sampled from one more policy, which has a model of the same kind as another.

        Args:
            name: of the new policy; if there is one of this name, it gets these weights.
            like: name of the policy whose kind of model it has.
            version: what tokens that are sampled from it say.
            source: where the engine reads its weights; None: it gets the present ones of `like`.

        Raises:
            ModelError: the weights do not fit the model.
            EngineFailure: the engine was stopped, or has failed.
        """
        ...

    async def remove_policy(self, name: str) -> None:
        """Free the memory of a policy that `add_policy` has added; its requests fail. An unknown name is ignored."""
        ...

    async def pause(self) -> None:
        """Return when no forward pass runs; none starts until `resume`."""
        ...

    async def resume(self) -> None:
        """Let forward passes run again after `pause`; requests continue where they stood."""
        ...

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's weights that a request which begins now is sampled from."""
        ...

    def load(self) -> EngineLoad:
        """Return what the engine has to do at this moment; cheap, and from any thread."""
        ...

    async def failure(self) -> str:
        """Return when the engine as a whole can't continue, and say why; an engine that was closed never returns."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests in flight fail with EngineFailure."""
        ...
