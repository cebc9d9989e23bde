"""The `[engine]` table: each kind of engine has keys of its own, and refuses the keys of other kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from palestra.config.engine_pool import InFlightUpdates, PooledEngineConfig, StuckSeconds, Sync
from palestra.config.engine_servers import NEEDS_PLACE, SglangEngineConfig, VllmEngineConfig
from palestra.config.section import Positive, Section
from palestra.errors import ConfigError


class EmbeddedEngineConfig(PooledEngineConfig):
    """`kind = "embedded"`, the default: transformers models, in this process or in workers."""

    kind: Literal["embedded"] = Field("embedded", description="The kind of engine; each has keys of its own.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of the engine's products, weights, keys and values."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: the GPU, if there is one.")
    threads: Positive | None = Field(
        None,
        description="CPU threads for arithmetic, of each worker. None: the cores divided among the workers; a single "
        "engine has those that other processes leave, or all if the job is deterministic.",
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
    """Return the kind of an engine, given as a table or as a section; a table without a kind is `embedded`.

    A table with a list of workers has as many kinds as the list.
    """
    if not isinstance(value, dict):
        return getattr(value, "kind", None)
    return value.get("kind", "mixed" if "workers" in value else "embedded")


def _one_of(kinds: Collection[str], example: str) -> Callable[[Any], Any]:
    """Return a check for unknown kinds of engines, because the error of pydantic's union would not name the key."""

    def known(value: Any) -> Any:
        kind = _kind_of(value)
        if not isinstance(value, dict | Section):
            raise ValueError(f"it is a table, such as {{kind = {example!r}}}, and not {value!r}")
        if kind not in kinds:
            raise ValueError(f"kind is {kind!r} (known kinds: {', '.join(map(repr, kinds))})")
        return value

    return known


WORKER_KINDS = ("embedded", "vllm", "sglang")
WorkersConfig = EmbeddedEngineConfig | VllmEngineConfig | SglangEngineConfig
_WorkersTable = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")]
    | Annotated[VllmEngineConfig, Tag("vllm")]
    | Annotated[SglangEngineConfig, Tag("sglang")],
    Discriminator(_kind_of),
    BeforeValidator(_one_of(WORKER_KINDS, "vllm")),
]


class MixedEngineConfig(Section):
    """`kind = "mixed"`, or a list of `workers`: one pool of inference workers of several kinds."""

    key_of_tables: ClassVar[str] = "workers"

    kind: Literal["mixed"] = Field("mixed", description="The kind of engine; each has keys of its own.")
    workers: tuple[_WorkersTable, ...] = Field(
        max_length=8,
        description="One table for each kind of workers, with the keys of `embedded`, `vllm` or `sglang`, except for "
        "`sync` and `stuck_seconds`, which are of the whole pool. The kinds `embedded` and `vllm` with `python` may "
        "stand there once each; all have the same `dtype`.",
    )
    sync: Sync = "rolling"
    stuck_seconds: StuckSeconds = 60.0

    @model_validator(mode="after")
    def _is_one_pool(self) -> MixedEngineConfig:
        if len(self.workers) < 2:
            raise ValueError("workers has less than two tables; the keys of a single kind stand in [engine] itself")
        for key in ("sync", "stuck_seconds"):
            for number, table in enumerate(self.workers):
                # By value: a configuration that was written with its defaults is read again.
                if getattr(table, key) != PooledEngineConfig.model_fields[key].default:
                    raise ValueError(f"workers.{number}.{key} is of the whole pool; write it beside workers")
        for number, table in enumerate(self.workers):
            if table.dtype != self.dtype:  # weights are kept for all workers in one precision
                raise ValueError(
                    f"workers.{number}.dtype is {table.dtype!r}, and workers.0.dtype is {self.dtype!r}; make them equal"
                )
        started = [table.kind for table in self.workers if table.started_count]
        urls = [url for table in self.workers for url in getattr(table, "url", None) or ()]
        if twice := [kind for kind in started if started.count(kind) > 1]:
            raise ValueError(f"workers start {twice[0]!r} in two tables; write one, with more replicas")
        if twice := [url for url in urls if urls.count(url) > 1]:
            raise ValueError(f"workers name {twice[0]} twice")
        return self

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        """Return the precision of products and weights, which all workers have."""
        return self.workers[0].dtype

    @property
    def pooled(self) -> bool:
        """Return True: workers of several kinds are one pool."""
        return True

    @property
    def worker_count(self) -> int:
        """Return how many inference workers a job begins with."""
        return sum(table.worker_count for table in self.workers)

    @property
    def started_count(self) -> int:
        """Return how many of its inference workers a job starts; the others are servers that run already."""
        return sum(table.started_count for table in self.workers)

    @property
    def tables(self) -> tuple[WorkersConfig, ...]:
        """Return the tables of the workers, one for each kind of them, with what is of the whole pool."""
        shared = {"sync": self.sync, "stuck_seconds": self.stuck_seconds}
        return tuple(table.model_copy(update=shared) for table in self.workers)


def require_place(engine: EngineConfig) -> None:
    """Refuse a job that is about to start, and whose vLLM has neither an interpreter nor an address.

    Raises:
        ConfigError: only a service could start the job, whose operator has an interpreter.
    """
    for table in engine.tables:
        if isinstance(table, VllmEngineConfig) and table.python is None and table.url is None:
            raise ConfigError(f"engine.kind is 'vllm': {NEEDS_PLACE}; without them, submit the job to a service")


EngineConfig = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")]
    | Annotated[VllmEngineConfig, Tag("vllm")]
    | Annotated[SglangEngineConfig, Tag("sglang")]
    | Annotated[MixedEngineConfig, Tag("mixed")]
    | Annotated[FakeEngineConfig, Tag("fake")],
    Discriminator(_kind_of),
    BeforeValidator(_one_of((*WORKER_KINDS, "mixed", "fake"), "fake")),
]
