"""The sampling of a call: values that the job fixes, that the caller may choose, and that cannot be trained."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from palestra.config import PolicyConfig
from palestra.errors import UnsupportedField
from palestra.types.calls import SamplingParams
from palestra.types.messages import GenerationRequest
from palestra.types.records import EpisodeKind

_SEEDS = 2**63


# Fields that change the distribution from which tokens are sampled, with the values that leave it unchanged.
_RESHAPING: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
}
_reshaping, _NEUTRAL = attrgetter(*_RESHAPING), tuple(_RESHAPING.values())


def trainable(call: GenerationRequest, ignore: bool) -> GenerationRequest:
    """Return a request without sampling fields that training episodes do not allow.

    Args:
        ignore: reset such fields; False: refuse them.

    Raises:
        UnsupportedField: a field changes the distribution, so the trainer could not compute the sampling probabilities
            of the tokens.
    """
    if _reshaping(call) == _NEUTRAL:
        return call
    asked = [field for field, neutral in _RESHAPING.items() if getattr(call, field) != neutral]
    if not ignore:
        field = asked[0]
        raise UnsupportedField(
            f"{field} is not possible in a training episode: it changes the distribution that tokens are drawn "
            "from, and the trainer, which takes the model's own, would compute other probabilities than those "
            f"sampled with; validation and ad-hoc episodes allow it. Leave {field} out, or set "
            'rollout.untrainable_sampling = "ignore" in the job to have it ignored',
            field,
        )
    return replace(call, **{field: _RESHAPING[field] for field in asked})


def sampling_of(
    call: GenerationRequest,
    config: PolicyConfig,
    kind: EpisodeKind,
    prompt_tokens: int,
    seed: int,
    choice: int,
    grammar: str,
) -> SamplingParams:
    """Return a call's sampling parameters: the job's in training, greedy in validation, else the caller's.

    Args:
        prompt_tokens: length of the prompt, less than `max_context`.
        seed: the call's own; a caller's seed takes precedence where it is allowed.
        choice: number of the choice, added to a caller's seed.
        grammar: of the reply; "": no constraint.
    """
    most = min(config.sampling.max_tokens, config.max_context - prompt_tokens)
    if call.max_tokens is not None:
        most = min(call.max_tokens, most)
    temperature = {"train": config.sampling.temperature, "validation": 0.0}.get(kind)
    if temperature is None:
        temperature = config.sampling.temperature if call.temperature is None else call.temperature
    if kind == "adhoc" and call.seed is not None:
        seed = (call.seed + choice) % _SEEDS
    return SamplingParams(
        temperature=temperature,
        max_tokens=most,
        seed=seed,
        min_tokens=min(call.min_tokens, most),
        top_p=call.top_p,
        top_k=call.top_k,
        stop_ids=call.stop_token_ids,
        presence_penalty=call.presence_penalty,
        frequency_penalty=call.frequency_penalty,
        logit_bias=call.logit_bias,
        grammar=grammar,
        top_logprobs=call.top_logprobs,
    )


def overruled(call: GenerationRequest, used: SamplingParams, choice: int = 0) -> str | None:
    """Describe the caller's values that the job replaced; None: it kept all."""
    notes = []
    if call.temperature is not None and call.temperature != used.temperature:
        notes.append(f"temperature={used.temperature:g}")
    if call.max_tokens is not None and call.max_tokens != used.max_tokens:
        notes.append(f"max_tokens={used.max_tokens}")
    if call.seed is not None and (call.seed + choice) % _SEEDS != used.seed:
        notes.append("seed=job")
    if _reshaping(call) != _NEUTRAL:
        for field, neutral in _RESHAPING.items():
            if getattr(call, field) != neutral and getattr(used, field) == neutral:
                notes.append(f"{field}={neutral:g}" if neutral != () else f"{field}=none")
    if call.thinking_budget is not None and call.thinking_budget < used.max_tokens:
        notes.append(f"budget_tokens={used.max_tokens}")
    return ", ".join(notes) or None
