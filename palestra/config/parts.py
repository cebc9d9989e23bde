"""Further parts of a job: checkpoints, the trainer, the store, the server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from palestra.config.section import Positive, Seconds, Section


class CheckpointConfig(Section):
    """Checkpoints, which hold weights, optimizer state and the step to resume from."""

    every_steps: Positive = Field(10, description="Save every so many steps; the last step is always saved.")
    keep: int = Field(
        2,
        ge=2,
        description="Checkpoints to keep; at least two, in case one is damaged. Where one policy is trained, the "
        "weights that validated best are kept in addition, in `checkpoints/best`.",
    )
    optimizer: bool = Field(
        True,
        description="Keep the optimizer's state in checkpoints, twice as much as weights take. Without it a resumed "
        "job begins with new moments.",
    )


class TrainerConfig(Section):
    """The trainer: precision, device and batch sizes of gradient computation."""

    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Precision of products; weights are float32.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: the GPU, if there is one.")
    threads: Positive | None = Field(
        None,
        description="CPU threads for arithmetic, of each process. None: the cores that others leave, or all if "
        "the job is deterministic.",
    )
    micro_batch_tokens: Positive | None = Field(
        None,
        description="Most tokens in one forward and backward pass: memory grows with it. None: 1,024 on a CPU, 8,192 "
        "on a GPU.",
    )
    logit_chunk: Positive = Field(2048, description="Most positions whose logits are in memory at the same time.")
    devices: Positive = Field(
        1,
        description="Devices over which weights, gradients and moments are shared out, each with a process of its own "
        "(FSDP2). 1: the job's own process trains.",
    )
    rank_timeout_seconds: Seconds = Field(
        120.0,
        description="With several devices: for how many seconds the job may hear nothing of one of the trainer's "
        "processes. After that all of them are ended and started again, and training continues from the newest "
        "checkpoint.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Whether layers are computed again in the backward pass, so that the memory of their activations "
        "is that of one layer; a step takes about a third longer.",
    )
    cpu_offload: bool = Field(
        False,
        description="With several CUDA devices: whether weights, gradients and moments wait in the CPU's memory.",
    )


class StoreConfig(Section):
    """The run store, a SQLite database in the run's folder."""

    synchronous: Literal["FULL", "NORMAL"] = Field(
        "FULL",
        description="SQLite's synchronous level. NORMAL survives kill -9; FULL also survives a loss of power.",
    )
    trained_logprobs_steps: int = Field(
        100,
        ge=0,
        description="Number of newest steps of which the logprob of each token when it was trained is kept, about "
        "4 bytes a token, for the page and for `load_run`; 0: none is recorded.",
    )


class ServerConfig(Section):
    """The data plane, which is the HTTP server of the job: its address and limits."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all. TLS needs a proxy.")
    port: int = Field(
        7411,
        ge=0,
        le=65535,
        description="Port to listen on; 0: any free port. A default that is in use gives way to any free port.",
    )
    max_body_bytes: Positive = Field(4 * 2**20, description="A larger body is refused with 413.")
    max_waiting_calls: Positive = Field(1024, description="More model calls at the same time are refused with 429.")
    max_wait_seconds: Seconds = Field(60.0, description="Longest time that a claim may wait for an episode.")

    @property
    def port_is_given(self) -> bool:
        """Return whether the port was configured, and must not be replaced by a free one."""
        return "port" in self.model_fields_set
