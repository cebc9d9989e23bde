"""The `[engine]` table of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from palestra.config.engine import OF_KIND, Alike, Dtype
from palestra.config.section import Positive, Seconds
from palestra.errors import ConfigError
from palestra_engines.external.config import Interpreter, ServerEngineConfig, Urls, is_local

_MOST_PORT = 65_535
NEEDS_PLACE = "give python, an interpreter that has vLLM, or url, a server that runs already: one of the two"
# Keys of a server that the job starts, which would have no effect on one that runs already.
_OF_STARTED = (
    "cache_gib",
    "gpu_memory_utilization",
    "threads",
    "compile",
    "tensor_parallel",
    "startup_seconds",
)


class VllmEngineConfig(ServerEngineConfig):
    """`kind = "vllm"`: a vLLM server, started by the job in its own environment, or running already."""

    placement_keys: ClassVar[frozenset[str]] = ServerEngineConfig.placement_keys | {
        "python",
        "startup_seconds",
        "weight_transfer",  # the weights are the same, however they come
        "weights_address",
    }
    product: ClassVar[str] = "vLLM"
    operator_keys: ClassVar[Mapping[str, str]] = {
        "python": "a program",
        **ServerEngineConfig.operator_keys,
        "weights_address": "an address of the service's machines",
    }
    program_key: ClassVar[str | None] = "python"

    kind: Literal["vllm"] = Field("vllm", description=OF_KIND)
    python: Interpreter | None = Field(
        None,
        description="Interpreter of an environment with vLLM 0.32 or newer, with which the job starts a server for "
        "each policy, and for each of several workers. A relative path begins in the folder of the "
        "configuration file, `~` in the home directory. None: `url` names a server, or a service has the interpreter.",
    )
    url: Urls | None = Field(
        None,
        description="URL of a vLLM server that runs already, for a job of one policy; it has to be started as "
        "`docs/how-to/vllm-server.md` says. A list of several, on any machines: each is an inference worker. "
        "None: the job starts them.",
    )
    weight_transfer: Literal["file", "gloo", "nccl"] = Field(
        "file",
        description="How whole weights reach the servers. `file`: by a file in shared memory, or in `weights_dir`; "
        "`gloo` and `nccl`: the job's process broadcasts them, through the memory of CPUs, or from GPU to GPU.",
    )
    weights_address: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?$",
        description="With `url`, and `gloo` or `nccl`: address of the job's machine, by which the servers reach it, "
        "such as `10.0.0.5`, or `10.0.0.5:29600` with a port. Only a private network may reach it. None: all servers "
        "are on this machine, and nothing else is listened to.",
    )
    dtype: Dtype = Field("bfloat16", description="Precision of the engine's products, weights, keys and values.")
    cache_gib: Positive | None = Field(
        None,
        description="Memory of each server for keys and values, in whole GiB. None: 1 on a CPU; on GPUs what is left "
        "of `gpu_memory_utilization` beside the weights.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Part of the memory of each of its GPUs that a server takes, weights included. None: 0.9, divided "
        "by the number of servers that share the GPU, where the trainer counts as one.",
    )
    threads: Positive | None = Field(
        None, description="CPU threads for arithmetic, of vLLM's build for CPUs. None: what vLLM chooses."
    )
    max_batch: Annotated[int, Field(ge=2)] = Field(64, description="Sequences that are decoded at the same time.")
    tensor_parallel: Positive = Field(
        1, description="GPUs that share each server's model; with vLLM's build for CPUs, processes."
    )
    compile: bool | None = Field(
        None,
        description="Whether vLLM compiles the model when it starts, which takes minutes and decodes faster, on GPUs "
        "with CUDA graphs. None: on GPUs.",
    )
    seeds: bool = Field(
        False,
        description="Whether vLLM draws from each call's seed. Then prompts are not split over forward passes: vLLM's "
        "build for CPUs ends where a seeded prompt is split.",
    )
    startup_seconds: Seconds = Field(600.0, description="How long a server may take to be ready.")

    @model_validator(mode="after")
    def _is_one_server(self) -> VllmEngineConfig:
        if self.python is not None and self.url is not None:
            raise ValueError(NEEDS_PLACE)
        # One without either is for a service, whose operator has the interpreter; see `require_place`.
        for key in () if self.url is not None else ("key_variable", "weights_dir", "weights_address"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key} is of a server that runs already; leave it out, or give url, and no python")
        # By value: a configuration that was written with its defaults is read again.
        changed = [key for key in _OF_STARTED if getattr(self, key) != VllmEngineConfig.model_fields[key].default]
        if self.url is not None and changed:
            raise ValueError(f"{changed[0]} is of a server that the job starts; leave it out, or leave out url")
        self._check_transfer()
        return self

    def _check_transfer(self) -> None:
        """Refuse keys without effect for the kind of weight transfer, and servers that cannot reach the trainer."""
        if self.weights_address is not None and not self.broadcasts:
            raise ValueError("weights_address is of weight_transfer = 'gloo' or 'nccl'; leave it out")
        if self.weights_dir is not None and self.broadcasts:
            raise ValueError("weights_dir is of weight_transfer = 'file'; leave it out")
        if self.weights_address is not None and int(self.weights_address.partition(":")[2] or 0) > _MOST_PORT:
            raise ValueError(f"weights_address has a port over {_MOST_PORT}")
        far = [url for url in self.url or () if not is_local(url)]
        if self.broadcasts and far and self.weights_address is None:
            raise ValueError(
                f"weight_transfer = {self.weight_transfer!r} needs weights_address, by which {far[0]} reaches this "
                "machine over a private network"
            )

    @property
    def broadcasts(self) -> bool:
        """Return whether new weights reach all workers by one broadcast."""
        return self.weight_transfer != "file"

    @property
    def transfer(self) -> str:
        """Return how whole weights reach the workers."""
        return self.weight_transfer

    def resources(self, policies: int) -> Alike:
        """Return the cluster resources of the job's workers."""
        return Alike(
            count=self.started_count,
            cores=(self.threads or 1) * policies,
            device="auto",
            cards=self.tensor_parallel * policies,
            needs_cards=self.tensor_parallel > 1,
            product=self.product,
        )

    def require_place(self) -> None:
        """Raise an error for a job without an interpreter or an address; see `EngineConfig`."""
        if self.python is None and self.url is None:
            raise ConfigError(f"engine.kind is 'vllm': {NEEDS_PLACE}; without them, submit the job to a service")
