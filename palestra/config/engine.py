"""The `[engine]` table: each kind of engine has its own keys, and refuses those of others.

Drivers are loaded when a configuration is first checked: their modules import this package.

The kinds' sections are in `palestra.engine.<kind>.config`, or in other packages; see `sections`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from palestra.config.section import Section, schema_by_kind
from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension

if TYPE_CHECKING:
    from palestra.config.job import JobConfig

GROUP = "palestra.engines"
DEFAULT_KIND = "embedded"  # of a table that names none


class KnownEngine(Protocol):
    """The part of a driver that a configuration uses; see `palestra.engine.driver.EngineDriver`."""

    section: type[PooledEngineConfig]


@cache
def drivers() -> Mapping[str, Any]:
    """Return a driver of each installed kind of engine, sorted by kind."""
    found: dict[str, KnownEngine] = {}
    for name, point in extensions(GROUP).items():
        driver: KnownEngine = load_extension(point)()
        if (kind := driver.section.model_fields["kind"].default) != name:
            raise ConfigError(f"the engine {name!r} of {point.value} has a section of kind {kind!r}; make them equal")
        found[name] = driver
    return found


def sections() -> dict[str, type[PooledEngineConfig]]:
    """Return the configuration section of each kind."""
    return {kind: driver.section for kind, driver in drivers().items()}


Dtype = Literal["bfloat16", "float32"]
MIXED = "mixed"
OF_KIND = "The kind of engine; each has keys of its own."


@dataclass(frozen=True, slots=True)
class Alike:
    """Equal processes of one role.

    Attributes:
        cores: of each without a bundle.
        device: as configured; None: it computes no model.
        cards: whole GPUs of each server process; None: one, or a part of one.
        needs_cards: whether GPUs are required, because several share a model.
        product: name of another project's server.
    """

    count: int
    cores: int = 1
    device: Literal["auto", "cpu", "cuda"] | None = None
    cards: int | None = None
    needs_cards: bool = False
    product: str = ""


def _kind_of(value: Any) -> Any:
    """Return the kind of an engine, given as a table or as a section; a table with a list of workers is `mixed`."""
    if not isinstance(value, dict):
        return getattr(value, "kind", None)
    return value.get("kind", MIXED if "workers" in value else DEFAULT_KIND)


class EngineConfig(Section):
    """The table of an engine. A field of this type takes a table of any installed kind.

    The properties tell other packages about an engine without its driver.
    """

    model_config = ConfigDict(defer_build=True)  # the kinds are known when the first configuration is checked

    has_model: ClassVar[bool] = True  # False: no model is loaded and none is trained, in tests
    placement_keys: ClassVar[frozenset[str]] = frozenset({"stuck_seconds"})  # they change no token

    kind: str = Field(description=OF_KIND)
    stuck_seconds: float = Field(
        60.0,
        ge=0.1,
        le=86_400,
        description="With several workers, and with servers of vLLM or SGLang: seconds after which a worker that has "
        "requests and makes no progress is replaced.",
    )

    @classmethod
    def alternatives(cls) -> Sequence[type[Section]]:
        """Return the sections that a field of this type may hold."""
        return (*sections().values(), MixedEngineConfig) if cls is EngineConfig else (cls,)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate a field of this type by the section that `kind` chooses."""
        found = {str(one.model_fields["kind"].default): one for one in cls.alternatives()}
        if list(found.values()) == [cls]:
            return handler(source)
        return schema_by_kind(found, _kind_of, handler)

    @property
    def pooled(self) -> bool:
        """Return whether the engine is a pool of inference workers outside the job's own process."""
        return self.worker_count > 1

    @property
    def worker_count(self) -> int:
        """Return the initial number of inference workers."""
        return sum(table.worker_count for table in self.tables)

    @property
    def started_count(self) -> int:
        """Return how many inference workers the job starts; the others are running servers."""
        return sum(table.started_count for table in self.tables)

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of running workers."""
        return tuple(url for table in self.tables for url in table.urls)

    @property
    def precision(self) -> Dtype:
        """Return the precision of the workers' weights."""
        return self.tables[0].precision

    @property
    def tables(self) -> tuple[PooledEngineConfig, ...]:
        """Return the tables of the workers, one for each kind, completed with the pool's settings."""
        raise NotImplementedError

    @property
    def keyed_tables(self) -> dict[str, PooledEngineConfig]:
        """Return the tables of the workers by their dotted keys."""
        tables = self.tables
        return {"engine" if len(tables) == 1 else f"engine.workers.{n}": table for n, table in enumerate(tables)}

    def not_trained(self) -> dict[str, Any]:
        """Return the keys that do not affect training, as pydantic's `exclude`."""
        return dict.fromkeys(self.placement_keys, True)

    @property
    def broadcasts(self) -> bool:
        """Return whether all workers take new weights together, by one broadcast."""
        return any(table.broadcasts for table in self.tables if table is not self)

    def check_job(self, job: JobConfig) -> None:
        """Raise ValueError for a job that an engine with these settings cannot sample for, naming the key."""

    def require_place(self) -> None:
        """Raise ConfigError for a starting job that only a service could start."""
        for table in self.tables:
            table.require_place()


class PooledEngineConfig(EngineConfig):
    """The table of an engine of one kind. A field of this type takes the kinds that can be mixed.

    Attributes:
        mixes: whether the workers may be part of a pool of several kinds.
        in_process: whether a single worker is in the job's own process.
        reads_images: whether vision-language models are supported.
        product: name of another project's server, for messages; "": none.
        operator_keys: keys that only a service's operator may set, and what they name.
        program_key: the one that names the program a job starts; None: it starts none.
    """

    placement_keys: ClassVar[frozenset[str]] = EngineConfig.placement_keys | {"replicas"}
    mixes: ClassVar[bool] = False
    in_process: ClassVar[bool] = True
    reads_images: ClassVar[bool] = True
    product: ClassVar[str] = ""
    operator_keys: ClassVar[Mapping[str, str]] = {}
    program_key: ClassVar[str | None] = None

    replicas: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Number of inference workers. Each is a process with a copy of the models, or a group of servers, "
        "one for each policy; 1: an embedded engine is in the job's own process.",
    )

    @classmethod
    def alternatives(cls) -> Sequence[type[Section]]:
        """Return the sections that a field of this type may hold."""
        return [one for one in sections().values() if one.mixes] if cls is PooledEngineConfig else (cls,)

    @property
    def pooled(self) -> bool:
        """Return whether the workers are processes, which are watched and replaced even if there is only one."""
        return self.worker_count > 1 or not self.in_process

    @property
    def worker_count(self) -> int:
        """Return the initial number of inference workers: started ones, or addresses."""
        return len(self.urls) or self.replicas

    @property
    def started_count(self) -> int:
        """Return how many inference workers the job starts; the others are running servers."""
        return 0 if self.urls else self.replicas

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of running workers."""
        return ()

    @property
    def precision(self) -> Dtype:
        """Return the precision of the workers' weights."""
        return "bfloat16"

    @property
    def transfer(self) -> str:
        """Return how whole weights reach the workers: by `file`, or a kind of broadcast."""
        return "file"

    @property
    def tables(self) -> tuple[PooledEngineConfig, ...]:
        """Return this table."""
        return (self,)

    def resources(self, policies: int) -> Alike:
        """Return the cluster resources of the job's workers."""
        return Alike(self.started_count)

    def require_place(self) -> None:
        """Raise ConfigError for a starting job that only a service could start; see `EngineConfig`."""


class MixedEngineConfig(EngineConfig):
    """`kind = "mixed"`, or a list of `workers`: one pool of inference workers of several kinds."""

    key_of_tables: ClassVar[str] = "workers"

    kind: Literal["mixed"] = Field("mixed", description=OF_KIND)
    workers: tuple[PooledEngineConfig, ...] = Field(
        max_length=8,
        description="One table for each kind of workers, with the keys of `embedded`, `vllm` or `sglang`, except for "
        "`stuck_seconds`, which is of the whole pool. The kinds `embedded` and `vllm` with `python` may "
        "stand there once each; all have the same `dtype`.",
    )

    @model_validator(mode="after")
    def _is_one_pool(self) -> MixedEngineConfig:
        if len(self.workers) < 2:
            raise ValueError("workers has less than two tables; the keys of a single kind stand in [engine] itself")
        for number, table in enumerate(self.workers):
            # By value: a configuration that was written with its defaults is read again.
            if table.stuck_seconds != EngineConfig.model_fields["stuck_seconds"].default:
                raise ValueError(f"workers.{number}.stuck_seconds is of the whole pool; write it beside workers")
        for number, table in enumerate(self.workers):
            if table.precision != self.precision:  # weights are kept for all workers in one precision
                raise ValueError(
                    f"workers.{number}.dtype is {table.precision!r}, and workers.0.dtype is {self.precision!r}; make "
                    "them equal"
                )
        started = [table.kind for table in self.workers if table.started_count]
        if twice := [kind for kind in started if started.count(kind) > 1]:
            raise ValueError(f"workers start {twice[0]!r} in two tables; write one, with more replicas")
        if twice := [url for url in self.urls if self.urls.count(url) > 1]:
            raise ValueError(f"workers name {twice[0]} twice")
        return self

    @property
    def pooled(self) -> bool:
        """Return True: workers of several kinds are one pool."""
        return True

    @property
    def tables(self) -> tuple[PooledEngineConfig, ...]:
        """Return the tables of the workers, one for each kind, completed with the pool's settings."""
        return tuple(table.model_copy(update={"stuck_seconds": self.stuck_seconds}) for table in self.workers)

    def not_trained(self) -> dict[str, Any]:
        """Return the keys that do not affect training, as pydantic's `exclude`."""
        each = {number: table.not_trained() for number, table in enumerate(self.workers)}
        return {**super().not_trained(), "workers": each}

    def check_job(self, job: JobConfig) -> None:
        """Refuse a job that one kind of worker cannot sample for; see `EngineConfig`."""
        for table in sorted(self.tables, key=lambda table: table.in_process):  # servers can do less
            table.check_job(job)


def default_engine() -> EngineConfig:
    """Return the engine of a job that names none."""
    try:
        return sections()[DEFAULT_KIND].model_validate({})
    except KeyError:
        raise ConfigError(
            "no engine is installed: the entry points of this package are missing; install it (pip install)"
        ) from None
