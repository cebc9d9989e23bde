"""The JSON bodies of the Tinker API, as clients send them.

Unknown fields are ignored, because newer clients send more. Values that depend on a model or a loss are validated when
the request is executed: refusing a numbered request earlier would leave a gap that blocks all later requests of the
model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator

from palestra.types.calls import SAMPLING_RANGES

Name = Annotated[str, Field(min_length=1, max_length=512)]
Number = Annotated[int, Field(ge=0, le=2**62)]
Metadata = dict[Annotated[str, Field(max_length=256)], Any]
METADATA_BYTES = 16_384  # of what a user says of a session, a model or a checkpoint, as JSON
Token = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class TinkerBody(BaseModel):
    """A request; infinite and NaN numbers are refused."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False, frozen=True)


class Described(TinkerBody):
    """A request with a user's metadata."""

    user_metadata: Metadata | None = None

    @field_validator("user_metadata")
    @classmethod
    def _is_short(cls, given: Metadata | None) -> Metadata | None:
        try:
            length = 0 if given is None else len(orjson.dumps(given))
        except TypeError as error:  # a whole number of more than 64 bits
            raise ValueError(str(error)) from error
        if length > METADATA_BYTES:
            raise ValueError(f"it is longer than {METADATA_BYTES} bytes")
        return given


class CreateSession(Described):
    """A new session of a client, with its name."""

    tags: list[Annotated[str, Field(max_length=256)]] = Field([], max_length=64)
    sdk_version: str = Field("", max_length=64)
    project_id: str | None = Field(None, max_length=256)
    display_name: str | None = Field(None, max_length=256)


class OfSession(TinkerBody):
    """A heartbeat of a session."""

    session_id: Name


class LoraConfig(TinkerBody):
    """The adapter of a model: its rank and its layers."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class TinkerOptimizer(TinkerBody):
    """The optimizer of a model; only AdamW is supported."""

    type: str = "adamw"


class CreateModel(Described):
    """A new adapter of a base model."""

    session_id: Name
    model_seq_id: Number
    base_model: Name
    lora_config: LoraConfig | None = None
    optimizer_config: TinkerOptimizer = TinkerOptimizer()


class OfModel(TinkerBody):
    """A question about a model."""

    model_id: Name


class InOrder(OfModel):
    """A numbered request to a model."""

    seq_id: Annotated[int, Field(ge=1, le=2**62)]


class AdamParams(TinkerBody):
    """The numbers of one update, sent with each step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(InOrder):
    """Apply the gradient. Other optimizers than Adam come in `optimizer_params`."""

    adam_params: AdamParams | None = None
    optimizer_params: TinkerOptimizer | None = None


class SaveWeights(InOrder, Described):
    """Save a model, or its weights for a sampler or for export, under the name `path`."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    sampling_session_seq_id: Number | None = None
    age_encryption_recipients: list[str] | None = None
    kind: str = "snapshot"


class LoadWeights(Described):
    """Load a checkpoint: as a new model of a session, or into an existing model."""

    model_id: Name | None = None
    seq_id: Annotated[int, Field(ge=1, le=2**62)] | None = None
    session_id: Name | None = None
    model_seq_id: Number | None = None
    base_model: Name | None = None
    path: Name
    optimizer: bool = False
    optimizer_config: TinkerOptimizer | None = None


class CreateSamplingSession(TinkerBody):
    """Sample from a base model, or from a checkpoint."""

    session_id: Name
    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Name | None = None


class TinkerChunk(TinkerBody):
    """A part of a prompt; only `encoded_text` is supported."""

    type: str = "encoded_text"
    tokens: list[Token] = []


class ModelInput(TinkerBody):
    """A prompt in pieces."""

    chunks: list[TinkerChunk] = Field(max_length=10_000)


class TinkerSampling(TinkerBody):
    """Sampling parameters and stops."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | list[Token] | None = None
    temperature: float = Field(1.0, ge=0, le=SAMPLING_RANGES["temperature"][1])
    top_k: int = Field(-1, ge=-1, le=int(SAMPLING_RANGES["top_k"][1]))
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(TinkerBody):
    """Sample replies to a prompt."""

    sampling_session_id: Name
    seq_id: Number
    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt: ModelInput
    sampling_params: TinkerSampling = TinkerSampling()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Number = 0
    topk_sample_logprobs: Number = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: Number = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None


class OfRequest(TinkerBody):
    """A question about the result of a request."""

    request_id: Name


class WeightsInfo(TinkerBody):
    """A question about a checkpoint, by its path."""

    tinker_path: Name


class CopyWeights(TinkerBody):
    """Copy a checkpoint: to a numbered model of a session, or to a new one; there are no projects here."""

    source_path: Name
    session_id: Name | None = None
    model_seq_id: Number | None = None
    destination_project_id: str | None = Field(None, max_length=256)
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class JoinSampler(TinkerBody):
    """A further client of a sampler."""

    sampling_session_id: Name


class FuturesTarget(JoinSampler):
    """A client of a sampler; the first has the number 0."""

    type: Literal["sampling_session"] = "sampling_session"
    cloned_sampler_id: Annotated[int, Field(ge=0, lt=2**31)] = 0


class OfFutures(TinkerBody):
    """Which further requests to a sampler have results; None: wait as long as usual."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None


class SetTTL(TinkerBody):
    """When a checkpoint expires; None: never."""

    ttl_seconds: int | None = None


class TinkerFinish(TinkerBody):
    """The end of a client, with its reason."""

    reason: dict[str, Any] = {}
    detail: Any = None
