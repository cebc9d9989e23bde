"""Sampling from base models and saved adapters: the engine's requests, and the clients' answers."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.engine.base import Engine, EngineRequest
from palestra.errors import InvalidRequest
from palestra.types.calls import SAMPLING_RANGES, SampledTokens, SamplingParams, TokenSequence
from palestra.waiting import together
from palestra_bases.tinker.bases import Base
from palestra_bases.tinker.datums import LOSS_INPUTS
from palestra_bases.tinker.protobuf import LENGTH, STOP, new
from palestra_bases.tinker.records import TinkerLimits
from palestra_bases.tinker.wire import Sample

MOST_TOP = int(SAMPLING_RANGES["top_logprobs"][1])  # most probable tokens that are reported of a position
_TOKEN_BYTES = 8  # of a token in a result: its id and its logprob
_UNREAD_TOKENS = 8  # tokens before a stop string's own that may change how its first characters are read


def policy_name(folder: Path) -> str:
    """Return the engine's policy name for an adapter's folder."""
    return f"adapter {folder}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A validated sampling request.

    Attributes:
        prompt: int32 [P].
        sampling: of each sequence; only their seeds differ.
        stops: texts that end a sequence.
        with_logprobs: first prompt position whose logprob is requested; None: none.
        top: requested number of most probable tokens at each sampled position.
    """

    prompt: TokenSequence
    sampling: tuple[SamplingParams, ...]
    stops: tuple[str, ...]
    with_logprobs: int | None
    top: int


def plan_of(asked: Sample, base: Base, limits: TinkerLimits, request_id: str) -> Plan:
    """Validate a sampling request. `request_id`: gives its seeds if it has none."""
    _check_supported(asked, limits)
    tokens = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
    if unknown := [chunk.type for chunk in asked.prompt.chunks if chunk.type != "encoded_text"]:
        raise InvalidRequest(f"prompt has a chunk of type {unknown[0]!r}; models here read text only", "prompt")
    if not 0 < len(tokens) < base.max_context:
        raise InvalidRequest(
            f"prompt has {len(tokens)} tokens, and a prompt of {base.name} has 1 to {base.max_context - 1}", "prompt"
        )
    params, room = asked.sampling_params, base.max_context - len(tokens)
    ids, texts = _stops_of(params.stop, base)
    for token in (*tokens, *ids):
        if not 0 <= token < base.vocab_size:
            raise InvalidRequest(f"there is no token {token}; the model's are 0 to {base.vocab_size - 1}", "prompt")
    most = min(params.max_tokens or room, room)
    size = _TOKEN_BYTES * asked.num_samples * most * (1 + asked.topk_sample_logprobs)
    if size > limits.sample_bytes:
        raise InvalidRequest(
            f"the result could have {size} bytes, and a result has at most {limits.sample_bytes}; lower num_samples, "
            "max_tokens or topk_sample_logprobs",
            "num_samples",
        )
    last = asked.prompt_logprobs_last_n
    if last is not None and (not asked.prompt_logprobs or last >= len(tokens)):
        raise InvalidRequest(
            "prompt_logprobs_last_n needs prompt_logprobs, and less than the prompt", "prompt_logprobs_last_n"
        )
    return Plan(
        prompt=TokenSequence(np.array(tokens, np.int32)),
        sampling=tuple(
            SamplingParams(
                temperature=params.temperature,
                max_tokens=most,
                seed=seed,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                stop_ids=ids,
                top_logprobs=asked.topk_sample_logprobs,
            )
            for seed in _seeds(params.seed, asked.num_samples, request_id)
        ),
        stops=texts,
        with_logprobs=None if not asked.prompt_logprobs else 1 if last is None else len(tokens) - last,
        top=asked.topk_sample_logprobs,
    )


def _check_supported(asked: Sample, limits: TinkerLimits) -> None:
    if asked.num_samples > limits.samples:
        raise InvalidRequest(f"num_samples is {asked.num_samples}, and at most {limits.samples}", "num_samples")
    if asked.topk_sample_logprobs > MOST_TOP:
        raise InvalidRequest(f"topk_sample_logprobs is at most {MOST_TOP}", "topk_sample_logprobs")
    if asked.record_stability_info:
        raise InvalidRequest(
            "record_stability_info is for the loss 'stable_reinforce', which is not supported here; there are "
            f"{', '.join(LOSS_INPUTS)}",
            "record_stability_info",
        )
    for name in ("topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
        if getattr(asked, name):
            raise InvalidRequest(f"{name} is not supported here; leave it out", name)


def _stops_of(stop: str | list[str] | list[int] | None, base: Base) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the stop tokens and stop texts. None: the tokens that end a text."""
    if stop is None:
        return base.stop_ids, ()
    given: Sequence[Any] = [stop] if isinstance(stop, str) else stop
    texts = tuple(one for one in given if isinstance(one, str))
    if len(given) > 64 or any(not text or len(text) > 256 for text in texts):
        raise InvalidRequest("stop has at most 64 entries, of 1 to 256 characters", "sampling_params.stop")
    return tuple(one for one in given if isinstance(one, int)), texts


def _seeds(seed: int | None, samples: int, request_id: str) -> list[int]:
    """Return a seed for each sequence, from the request's seed, or from its id."""
    start = f"request {request_id}" if seed is None else f"seed {seed}"
    digests = (hashlib.sha256(f"{start} {number}".encode()).digest() for number in range(samples))
    return [int.from_bytes(digest[:8], "big") for digest in digests]


async def sample_response(engine: Engine, policy: str, plan: Plan, base: Base) -> bytes:
    """Return the message `SampleResponse` for a request. Raises what `Engine.generate` raises."""
    sequences = await together(*(_sequence(engine, policy, plan, one, base) for one in plan.sampling))
    message = new("SampleResponse", sequences=sequences)
    if plan.with_logprobs is not None:
        scored = np.array([np.nan, *await engine.score(policy, plan.prompt)], "<f4")
        scored[: plan.with_logprobs] = np.nan
        message.prompt_logprobs = scored.tobytes()
    encoded: bytes = message.SerializeToString()
    return encoded


async def _sequence(engine: Engine, policy: str, plan: Plan, sampling: SamplingParams, base: Base) -> Any:
    ids, logprobs = list[int](), list[float]()
    top_ids, top_logprobs = bytearray(), bytearray()  # as objects they would take twelve times the memory
    stopped = False
    pieces = engine.generate(
        EngineRequest(policy=policy, prompt=plan.prompt, sampling=sampling, streamed=bool(plan.stops))
    )
    async with contextlib.aclosing(pieces) as reply:  # type: ignore[type-var]  # an async generator, of every engine
        async for piece in reply:
            for token, logprob, most in _tokens_of(piece):
                ids.append(token)
                logprobs.append(logprob)
                if most:
                    top_ids += np.array([probable for probable, _ in most], "<i4").tobytes()
                    top_logprobs += np.array([each for _, each in most], "<f4").tobytes()
                stopped = token in sampling.stop_ids or _ends_with(ids, plan.stops, base)
                if stopped:
                    break
            if stopped:
                break
    found = new(
        "SampledSequence",
        stop_reason=STOP if stopped else LENGTH,
        tokens=np.array(ids, "<i4").tobytes(),
        logprobs=np.array(logprobs, "<f4").tobytes(),
    )
    if top_ids:
        found.topk_sampled_logprobs.CopyFrom(
            new(
                "TopkLogprobs",
                token_ids=bytes(top_ids),
                logprobs=bytes(top_logprobs),
                k=len(top_ids) // (4 * len(ids)),
                length=len(ids),
            )
        )
    return found


def _tokens_of(piece: SampledTokens) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    top = piece.top or ((),) * len(piece.ids)
    return list(zip(piece.ids, piece.logprobs, top, strict=True))


def _ends_with(ids: Sequence[int], stops: Sequence[str], base: Base) -> bool:
    if not stops:
        return False
    # A token has at least one byte, and a character at most four.
    near = ids[-(4 * max(map(len, stops)) + _UNREAD_TOKENS) :]
    text = base.tokenizer.decode(near)
    return any(stop in text for stop in stops)
