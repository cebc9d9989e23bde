"""A request's parameters in SGLang's terms; what SGLang does differently, or does not document, is refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from palestra.errors import InvalidRequest
from palestra.types.calls import SamplingParams


def sglang_sampling(sampling: SamplingParams, stop_ids: Collection[int]) -> dict[str, Any]:
    """Return the `sampling_params` of a request.

    The seed is not sent, because SGLang only supports it in its deterministic mode.

    Args:
        stop_ids: tokens that end every reply of the policy.
    """
    # Its logprobs are those after the temperature, before top p and top k leave tokens out.
    if sampling.top_p < 1.0:
        raise InvalidRequest("SGLang's logprobs are not those of top_p; leave it at 1", "top_p")
    if sampling.top_k:
        raise InvalidRequest("SGLang's logprobs are not those of top_k; leave it at 0", "top_k")
    if sampling.logit_bias:
        raise InvalidRequest("SGLang's /generate has no logit_bias", "logit_bias")
    if sampling.grammar:
        # Which tokens a schema allows differs between SGLang's backends and the trainer's.
        raise InvalidRequest("an engine of the kind 'sglang' has no grammars", "response_format")
    return {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": sorted({*stop_ids, *sampling.stop_ids}),
        "ignore_eos": True,  # the policy's own stop tokens are among those above
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
