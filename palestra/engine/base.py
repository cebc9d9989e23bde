"""The interface of all engines: they sample tokens from the newest weights of each policy."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from palestra.errors import InvalidRequest, ReplyLost
from palestra.models.weights import WeightSource
from palestra.types.calls import (
    LARGEST_BIAS,
    MOST_LISTED,
    SAMPLING_RANGES,
    PolicyVersion,
    SampledTokens,
    SamplingParams,
    TokenSequence,
)

PREFIX_TOKENS = 32_768  # of each policy, whose keys and values a worker keeps, and whose worker is remembered
# Words, names, numbers, code, other scripts: places at which tokenizers differ.
SAMPLE_TEXT = "Tokenizers differ: 1,234.5 km, naïve Zürich, def f(x):\n    return x**2  # 東京, Москва 🙂\n"


def check_prompt(prompt: TokenSequence, vocab_size: int, most_tokens: int, sees: bool) -> None:
    """Raise InvalidRequest for a prompt that the model cannot read. `prompt` has [P] ids and their pictures; `sees`: it
    is a vision-language model.
    """
    ids = prompt.ids
    if prompt.media and not sees:
        raise InvalidRequest("this model reads text only, and the prompt has a picture", "prompt")
    one_list = ids.ndim == 1 and 0 < len(ids) <= most_tokens
    if not one_list or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise InvalidRequest(
            f"a prompt has 1 to {most_tokens} tokens, and all are from 0 to {vocab_size - 1}", "prompt"
        )


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for sampling parameters out of range, naming the field, and for unknown tokens."""
    for name, (least, most) in SAMPLING_RANGES.items():
        if not least <= getattr(sampling, name) <= most:  # NaN is in no range
            raise InvalidRequest(f"{name} has to be from {least} to {most}", name)
    if not all(abs(bias) <= LARGEST_BIAS for _, bias in sampling.logit_bias):
        raise InvalidRequest(f"biases are from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}", "logit_bias")
    for name, named in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_ids),
    ):
        if len(named) > MOST_LISTED or not all(0 <= token < vocab_size for token in named):
            raise InvalidRequest(f"{name} names at most {MOST_LISTED} tokens, from 0 to {vocab_size - 1}", name)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits, from a call's seed and a token's position in its reply."""
    return uniforms(seed, range(position, position + 1))[0]


def uniforms(seed: int, positions: range) -> list[float]:
    """Return the numbers of several positions; see `uniform`."""
    found = []
    for position in positions:
        digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
        found.append((int.from_bytes(digest, "little") >> 11) * 2.0**-53)
    return found


class TokenReplay:
    """Delivers each token of a reply once, even if the reply is sampled several times.

    A request has a seed, so a retry repeats the same tokens unless other weights or another batch changed the
    arithmetic. Delivered tokens cannot be taken back, so tokens of a retry are compared with them, and skipped while
    they are equal.
    """

    def __init__(self) -> None:
        self._given: list[int] = []  # tokens that the caller has
        self._seen = 0  # tokens of the present attempt

    @property
    def tokens(self) -> list[int]:
        """Return the tokens that the caller has."""
        return self._given

    def begin_again(self) -> None:
        """Begin another attempt."""
        self._seen = 0

    def take(self, piece: SampledTokens) -> SampledTokens | None:
        """Return the part of a piece that the caller does not have yet; None: it has all of it. Raises ReplyLost: the
        piece differs from what the caller has.
        """
        if self._seen == len(self._given):  # the usual case: nothing is repeated
            self._given += piece.ids
            self._seen += len(piece.ids)
            return piece
        known = min(len(piece.ids), len(self._given) - self._seen)
        if list(piece.ids[:known]) != self._given[self._seen : self._seen + known]:
            raise ReplyLost("a reply was lost before its end, and sampling it again has given other tokens")
        self._seen += known
        if known == len(piece.ids):
            return None
        rest = piece.ids[known:]
        self._given += rest
        self._seen += len(rest)
        return SampledTokens(ids=rest, logprobs=piece.logprobs[known:], version=piece.version, top=piece.top[known:])

    def end(self) -> None:
        """Check that the ended attempt is as long as what the caller has. Raises ReplyLost: it is shorter."""
        if self._seen < len(self._given):
            raise ReplyLost("a reply was lost before its end, and sampling it again has given fewer tokens")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineRequest:
    """A request for one sampled reply: token ids in, token ids out. Text is handled by the session."""

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
    """The present load of an engine, and its counters since it was created."""

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
    """What a pool of inference workers offers in addition to `Engine`."""

    async def scores(self, policy: str, prompt: TokenSequence) -> list[list[float]]:
        """Return the scores of a prompt from each worker that serves; see `Engine.score`."""
        ...

    async def resize(self, count: int) -> None:
        """Change the number of workers, and return when it is reached."""
        ...

    async def next_loss(self) -> str:
        """Wait until a worker is lost or fails to start, and return the reason."""
        ...


class Engine(Protocol):
    """Samples tokens from the newest weights of each of its policies."""

    def generate(self, request: EngineRequest) -> AsyncIterator[SampledTokens]:
        """Stream a reply, which ends with a stop token or at `max_tokens`. Closing the iterator cancels the request.

        Raises:
            InvalidRequest: the engine cannot answer such a request.
            EngineFailure: the reply could not be finished; its tokens must not be used.
            ReplyLost: the worker that sampled the beginning died. A caller that has not passed on any token may retry.
        """
        ...

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Return the log-probability of each prompt token but the first, given the tokens before it: [P - 1].

        They are at temperature 1, over all tokens. The prompt has at least one of its [P] ids, with their images.

        Raises:
            InvalidRequest: the engine cannot answer such a request.
            EngineFailure: the engine was stopped, or has failed.
        """
        ...

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Replace a policy's weights between two forward passes.

        Later requests do not reuse anything computed with older weights. Other policies are unchanged. The source has
        been read completely when this returns.

        Raises:
            ModelError: the weights do not fit; the policy keeps its old ones.
            EngineFailure: the engine was stopped, or has failed.
        """
        ...

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Add a policy whose model is of the same kind as that of `like`, and has its present weights without a source;
        an existing policy gets the new weights. Raises ModelError: the weights do not fit the model. Raises
        EngineFailure: the engine was stopped, or has failed.
        """
        ...

    async def remove_policy(self, name: str) -> None:
        """Free the memory of a policy added by `add_policy`; its requests fail. Unknown names are ignored."""
        ...

    async def pause(self) -> None:
        """Wait until no forward pass runs; none starts until `resume`."""
        ...

    async def resume(self) -> None:
        """Allow forward passes again after `pause`; requests continue where they stopped."""
        ...

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of the weights that a new request of the policy is sampled from."""
        ...

    def load(self) -> EngineLoad:
        """Return the present load; cheap and thread-safe."""
        ...

    async def failure(self) -> str:
        """Wait until the engine as a whole fails, and return the reason; never returns after `close`."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests in flight fail with EngineFailure."""
        ...
