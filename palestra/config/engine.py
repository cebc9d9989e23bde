"""The `[engine]` table: each kind of engine has keys of its own, and refuses the keys of other kinds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from palestra.config.engine_pool import InFlightUpdates, PooledEngineConfig
from palestra.config.engine_servers import SglangEngineConfig, VllmEngineConfig
from palestra.config.renames import new_value
from palestra.config.section import Positive, Section


class EmbeddedEngineConfig(PooledEngineConfig):
    """`kind = "embedded"`, the default: transformers models, in this process or in workers."""

    kind: Literal["embedded"] = Field("embedded", description="The kind of engine; each has keys of its own.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of the engine's products, weights, keys and values."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: the GPU, if there is one.")
    threads: Positive | None = Field(
        None,
        description="CPU threads for arithmetic, of each worker. None: all cores, divided among the workers.",
    )
    max_batch: Annotated[int, Field(ge=2)] = Field(64, description="Sequences that are decoded at the same time.")
    prefill_tokens: Positive = Field(2048, description="Most prompt tokens in one forward pass.")
    prefill_chunk: Positive = Field(
        512,
        description="Most prompt tokens in one forward pass while replies are being sampled, so that a long prompt "
        "does not delay them.",
    )
    cache_gib: float | None = Field(
        None,
        gt=0,
        description="Memory for keys and values of each worker, in GiB. A call starts when its longest reply fits. "
        "None: a quarter of the machine's memory, divided among the workers, or half of what is free on the GPU.",
    )
    in_flight_updates: InFlightUpdates = "continue"
    prefix_cache_tokens: int = Field(
        32768, ge=0, description="Prompt tokens of each policy whose keys and values are kept."
    )


class FakeEngineConfig(PooledEngineConfig):
    """`kind = "fake"`: digits that follow from the seed, without a model; for tests."""

    kind: Literal["fake"] = Field("fake", description="The kind of engine; each has keys of its own.")
    delay_seconds: float = Field(0.0, ge=0, description="Time that the engine takes for a reply, in seconds.")
    reply_tokens: Positive = Field(32, description="Longest reply, in tokens.")


def _kind_of(value: Any) -> Any:
    """Return the kind of an engine, given as a table or as a section; a table without a kind is `embedded`."""
    return value.get("kind", "embedded") if isinstance(value, dict) else getattr(value, "kind", None)


def _known_kind(value: Any) -> Any:
    """Refuse an unknown kind of engine, because the error of pydantic's union would not name the key."""
    kind = _kind_of(value)
    if not isinstance(value, dict | Section):
        raise ValueError(f"it is a table, such as {{kind = 'fake'}}, and not {value!r}")
    if kind not in KINDS:
        now = new_value("kind", kind)
        hint = f"{kind!r} has a new name; write kind = {now!r}" if now else f"kind is {kind!r}"
        raise ValueError(f"{hint} (known kinds: {', '.join(map(repr, KINDS))})")
    return value


EngineConfig = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")]
    | Annotated[VllmEngineConfig, Tag("vllm")]
    | Annotated[SglangEngineConfig, Tag("sglang")]
    | Annotated[FakeEngineConfig, Tag("fake")],
    Discriminator(_kind_of),
    BeforeValidator(_known_kind),
]
KINDS = ("embedded", "vllm", "sglang", "fake")
