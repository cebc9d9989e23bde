"""The `[engine]` table of the embedded engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from palestra.config.engine import OF_KIND, Alike, Dtype, PooledEngineConfig
from palestra.config.section import Positive

if TYPE_CHECKING:
    from palestra.config.job import JobConfig


class EmbeddedEngineConfig(PooledEngineConfig):
    """`kind = "embedded"`, the default: transformers models, in this process or in workers."""

    mixes: ClassVar[bool] = True

    kind: Literal["embedded"] = Field("embedded", description=OF_KIND)
    dtype: Dtype = Field("bfloat16", description="Precision of the engine's products, weights, keys and values.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: the GPU, if there is one.")
    threads: Positive | None = Field(
        None,
        description="CPU threads for arithmetic, of each worker. None: the cores divided among the workers; a single "
        "engine has those that other processes leave, or all if the job is deterministic.",
    )
    max_batch: Annotated[int, Field(ge=2)] = Field(64, description="Sequences that are decoded at the same time.")
    cache_gib: float | None = Field(
        None,
        gt=0,
        description="Memory for keys and values of each worker, in GiB. A call starts when its longest reply fits. "
        "None: a quarter of the machine's memory, divided among the workers, or half of what is free on the GPU.",
    )

    @property
    def precision(self) -> Dtype:
        """Return the precision of the weights that workers get."""
        return self.dtype

    def resources(self, policies: int) -> Alike:
        """Return the cluster resources of the job's workers."""
        return Alike(self.started_count, self.threads or 1, self.device)

    def check_job(self, job: JobConfig) -> None:
        """Refuse a deterministic job whose workers share the cores; see `EngineConfig`."""
        if job.deterministic and self.replicas > 1 and self.threads is None:
            raise ValueError(
                "deterministic = true with engine.replicas needs engine.threads: products of another number of "
                "threads may round differently, and by default the workers divide the cores"
            )
