"""Further parts of a job: checkpoints, the trainer, the server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from palestra.config.roles import AgentName
from palestra.config.section import Positive, Seconds, Section


class WatchdogConfig(Section):
    """Ends a training job without progress, and names the stuck part."""

    stuck_seconds: float = Field(
        3600.0,
        ge=0,
        description="Time without an accepted token, a verdict of a judge or a finished step after which the job "
        "fails; 0: never. A step has to be shorter. Time in which the job is in order and only waits for workers does "
        "not count.",
    )


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:[0-9]{1,5})?", re.ASCII)


class PicturesConfig(Section):
    """Pictures in messages: their space on disk, and the hosts from which URLs are fetched."""

    store_gib: float = Field(
        20.0, gt=0, description="Most that the pictures of the run take on disk, each counted once. More are refused."
    )
    hosts: list[str] = Field(
        [],
        description="Hosts, or `host:port`, whose http and https URLs may stand in messages; the server fetches them. "
        "[]: a URL is refused. A name that leads to a private address is refused, too.",
    )
    private_hosts: list[str] = Field(
        [], description="As `hosts`, of this machine or a private network: their addresses are not looked at."
    )

    @field_validator("hosts", "private_hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        lowered = [host.lower() for host in hosts]
        for host in lowered:
            if _HOST.fullmatch(host) is None:
                raise ValueError(f"{host!r} is no host, as images.example.com, or 10.0.0.7:8080")
        return lowered


MAX_SEATS = 64  # of an episode


class SeatsConfig(Section):
    """The agents that external workers play. The server runs the environment and all other agents."""

    roles: list[AgentName] = Field(
        [],
        max_length=MAX_SEATS,
        description="Names of the agents that are seats: a worker claims one with `role` and plays it for an episode. "
        "Empty: the job has no seats.",
    )
    takeover: Literal["worker", "policy", "replay"] = Field(
        "worker",
        description="What happens to a seat whose worker has died or has left. `worker`: another worker claims it and "
        "continues; `policy`: the policy of its role plays the rest of the episode; `replay`: the episode is retried "
        "from the start.",
    )
    wait_seconds: Seconds = Field(
        600.0,
        description="Longest time that an episode waits for a seat that has to act. Without a worker that claims it, "
        "the attempt fails; with `takeover = policy` the policy of the role plays the seat instead, if a worker has "
        "claimed any seat of the episode. From a worker that does not act, the seat is taken, as when its lease has "
        "run out; a shorter limit of the environment itself (`time_limits`) comes first.",
    )

    @model_validator(mode="after")
    def _are_whole_agents(self) -> SeatsConfig:
        if len(set(self.roles)) != len(self.roles):
            raise ValueError(f"a role of seats is named twice: {', '.join(map(repr, self.roles))}")
        for role in self.roles:
            if "/" in role:
                raise ValueError(f"{role!r} is a subagent, which is played by the worker of its parent's seat")
        return self

    def seat_of(self, agent: str) -> str | None:
        """Return the external player of an agent: itself, or the one that its name begins with; None: the server plays
        it.
        """
        seat = agent.partition("/")[0]
        return seat if seat in self.roles else None


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
    devices: Positive = Field(
        1,
        description="Devices over which weights, gradients and moments are shared out, each with a process of its own "
        "(FSDP2). 1: the job's own process trains.",
    )
    stuck_seconds: Seconds = Field(
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


HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,99}$")]


class ServerConfig(Section):
    """The data plane, which is the HTTP server of the job: its address and limits."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all. TLS needs a proxy.")
    port: int = Field(
        7411,
        ge=0,
        le=65535,
        description="Port to listen on; 0: any free port. A default that is in use gives way to any free port.",
    )
    max_body_bytes: Positive = Field(8 * 2**20, description="A larger request is refused with 413.")
    max_waiting_calls: Positive = Field(1024, description="More model calls at the same time are refused with 429.")
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="How to treat fields of model calls that the server does not know, and sampling fields that a "
        "training episode can't have, because the trainer could not compute the probabilities: `top_p` below 1, "
        "`top_k`, `min_tokens`, penalties, `logit_bias`. `refuse`: with 400; `ignore`: they have no effect, for "
        "frameworks that always send them; the former are counted (`ignored_fields` of `/status`), and the header "
        "`x-palestra-sampling` names the latter. Other fields that are known to change what is sampled are refused "
        "either way.",
    )
    agent_headers: dict[HeaderName, HeaderName | Literal[""]] = Field(
        {},
        description="More headers by which subagents are known: the header with a subagent's id, and the header that "
        "only a subagent sends; empty if main agents send no id. Claude Code and opencode are known. The calls are "
        "those of the agent `agent/ID`.",
    )
    auxiliary_prompts: tuple[Annotated[str, Field(min_length=8)], ...] = Field(
        (),
        description="More beginnings of system messages or last messages of calls that an agent makes beside its task, "
        "for example for a title. A call without tools that begins so is one of the agent `agent/auxiliary`. The "
        "system messages of Claude Code and opencode are known.",
    )

    @property
    def port_is_given(self) -> bool:
        """Return whether the port was configured, and must not be replaced by a free one."""
        return "port" in self.model_fields_set


class SandboxConfig(Section):
    """The box in which a program runs: of an image by podman or docker, else of this machine's `/usr` by bubblewrap."""

    image: str | None = Field(
        None,
        description="Name of an image, or the path of its archive (`.tar`, `.tar.gz`, `.tgz`) or of a folder with a "
        "Dockerfile, which begins with `./`, `../`, `~` or `/`.",
    )
    cpus: float | None = Field(None, gt=0, description="Processors of all its programs together; containers only.")
    memory_mib: Positive = Field(2048, description="Memory of all its programs together, in MiB.")
    disk_mib: Positive | None = Field(1024, description="What it may write, in MiB. None: any number, containers only.")


class HarnessConfig(Section):
    """A program plays each episode in a workspace, and what it leaves there is scored."""

    name: str = Field(min_length=1, description="Name of the harness; `palestra harness list` has all.")
    score: Path | None = Field(
        None,
        description="Python file whose function `score(task, result)` returns the reward; `FILE:NAME` for another "
        "function. None: `reward` of `palestra.train`.",
    )
    folder: Path | None = Field(
        None, description="Folder or archive, such as a repository, that each workspace begins with. None: empty."
    )
    timeout_seconds: Seconds = Field(
        600.0, description="An episode whose program runs longer is a forfeit; a failure, if the model has not replied."
    )
    max_calls: Positive | None = Field(
        None,
        description="Answered model calls after which the program is ended and its workspace scored, as truncated; "
        "looked at every second. None: any number.",
    )
    max_tokens: Positive | None = Field(
        None, description="The same for sampled tokens of an episode. None: any number."
    )
    sandbox: SandboxConfig | None = Field(
        None, description="A box of each episode that the program runs in, and its limits. None: no isolation."
    )
