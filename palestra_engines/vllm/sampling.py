"""A request's parameters in vLLM's terms; what vLLM would silently do differently is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from palestra.errors import EngineFailure, InvalidRequest
from palestra.terminal import problem
from palestra.types.calls import PolicyVersion, SamplingParams, VersionSpan
from palestra_engines.external.api import Chunk


def list_of(event: Any, key: str) -> list[Any]:
    """Return the list under a key of an answer."""
    found = event.get(key) if isinstance(event, dict) else None
    if not isinstance(found, list):
        raise EngineFailure(f"the engine answered without {key}")
    return found


def chunk_of(choice: Mapping[str, Any], top: int, owner: str | None) -> Chunk:
    """Return a choice of vLLM's answer as a chunk. `top` most probable tokens were requested; `owner` is whose weights
    the server must have; None: vLLM's versions are not the policy's.
    """
    try:
        ids = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        if [each["token_id"] for each in content] != ids:
            raise EngineFailure("the engine sent logprobs of other tokens than those that it has sampled")
        finish, spans = choice["finish_reason"], choice.get("weight_versions")
        return Chunk(
            ids=tuple(ids),
            logprobs=tuple(float(each["logprob"]) for each in content),
            top=tuple(_most_probable(each["top_logprobs"], top) for each in content) if top else (),
            finish=finish,
            versions=None if spans is None or finish is None or owner is None else _spans(spans, owner),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineFailure(f"the engine sent a reply that can't be read: {problem(error)}") from error


def _most_probable(said: Sequence[Mapping[str, Any]], top: int) -> tuple[tuple[int, float], ...]:
    """Return the most probable tokens of a position, best first; the sampled one comes first in vLLM's list."""
    pairs = sorted(((int(each["token_id"]), float(each["logprob"])) for each in said), key=lambda pair: -pair[1])
    return tuple(pairs[:top])


def _spans(said: Sequence[Mapping[str, Any]], owner: str) -> tuple[VersionSpan, ...]:
    """Return which versions sampled a reply, from its first token to its last without a gap."""
    spans, at = [], 0
    for each in said:
        version, _, whose = str(each["version"]).rpartition("-")
        if whose != owner:
            raise EngineFailure(
                "the engine's server has weights that this job has not sent; another job uses the same engine.url, and "
                "a server can have one at a time"
            )
        incarnation, number = map(int, version.split("."))
        if each["start"] != at or each["end"] < at:
            raise EngineFailure("the engine names versions for parts of a reply that overlap or leave gaps")
        at = int(each["end"])
        spans.append(VersionSpan(PolicyVersion(incarnation, number), at - int(each["start"])))
    return tuple(spans)


LOWEST_TEMPERATURE = 0.01  # vLLM raises a lower one to this, other than 0
# Tokens of a reply that are sent together where nobody reads them one by one. An event of one token costs both sides
# together about a millisecond of a core; with sixteen, a reply's progress is still seen every second or so.
TOGETHER = 16
MOST_TOP_LOGPROBS = 20  # the most of OpenAI's API


def vllm_sampling(sampling: SamplingParams, stop_ids: Collection[int], seeded: bool, streamed: bool) -> dict[str, Any]:
    """Return the `sampling_params` of a request.

    vLLM's logprobs are those of the sampling distribution (`--logprobs-mode processed_logprobs`): after bias,
    penalties, grammar, temperature, top k and top p, as in `SampledTokens`. `stop_ids` end every reply of the policy.
    `seeded` sends the call's seed; `streamed` sends each token by itself, otherwise only the first one is, and later
    ones in groups.
    """
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise InvalidRequest(f"vLLM has temperature 0, or at least {LOWEST_TEMPERATURE}", "temperature")
    if sampling.top_logprobs > MOST_TOP_LOGPROBS:
        raise InvalidRequest(f"this engine reports at most {MOST_TOP_LOGPROBS} tokens a position", "top_logprobs")
    if sampling.grammar and sampling.min_tokens:
        raise InvalidRequest("vLLM can't keep min_tokens where a grammar ends the reply earlier", "min_tokens")
    found: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        # One more than is asked for: vLLM counts the sampled token, which may not be among the most probable ones.
        "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
        "stop_token_ids": sorted({*stop_ids, *sampling.stop_ids}),
        "ignore_eos": True,  # the policy's own stop tokens are among those above
        "detokenize": False,
        "skip_special_tokens": False,
        "stream_interval": 1 if streamed else TOGETHER,
    }
    if sampling.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.grammar:
        found["structured_outputs"] = _structured(sampling.grammar)
    if seeded:
        found["seed"] = sampling.seed
    return found


def _structured(grammar: str) -> dict[str, str]:
    """Return a grammar as vLLM takes it for llguidance: a JSON schema, or rules in Lark's syntax."""
    if not grammar.lstrip().startswith("{"):
        return {"grammar": grammar}
    parts = json.loads(grammar).get("grammars", [])
    if len(parts) == 1 and set(parts[0]) == {"json_schema"}:
        return {"json": json.dumps(parts[0]["json_schema"])}
    if len(parts) == 1 and set(parts[0]) == {"lark_grammar"}:
        return {"grammar": parts[0]["lark_grammar"]}
    raise InvalidRequest("vLLM takes a grammar that is one JSON schema, or rules in Lark's syntax", "response_format")
