"""The `[engine]` tables of engines that are servers of other projects: vLLM and SGLang."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from palestra.config.engine_pool import InFlightUpdates, PooledEngineConfig
from palestra.config.section import Positive, Seconds

if TYPE_CHECKING:
    from palestra.config.policy import PolicyConfig

MOST_PORT = 65_535
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


_ADDRESS = r"https?://[^\s/?#@]+"


def _address(url: Any) -> Any:
    """Refuse what is no address, and that of a route, such as OpenAI's clients take, with the one that is needed."""
    if isinstance(url, str) and "@" in url:
        raise ValueError("the address of a server has no key or password in it; engine.key_variable names a variable")
    if isinstance(url, str) and (found := re.match(f"({_ADDRESS})[/?#]", url)):
        raise ValueError(f"give the server's address alone, without a path: {found[1]}")
    if isinstance(url, str) and re.fullmatch(_ADDRESS, url) is None:
        raise ValueError(f"{url!r} is no address; give one such as http://127.0.0.1:8000")
    return url


Url = Annotated[str, BeforeValidator(_address), Field(pattern=f"^{_ADDRESS}$")]


def _one_or_several(urls: Any) -> Any:
    """Return one address or several as a tuple, because a union of pydantic's would not name the key of a mistake."""
    return (urls,) if isinstance(urls, str) else urls


def _each_once(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an address that is given twice: its server would be two workers."""
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(f"{url} is given twice")
    return urls


Urls = Annotated[
    tuple[Url, ...],
    BeforeValidator(_one_or_several),
    Field(min_length=1, max_length=64),
    AfterValidator(_each_once),
    PlainSerializer(lambda urls: urls[0] if len(urls) == 1 else list(urls), str | list[str]),
]


def _from_home(python: Path) -> Path:
    """Return a path in which `~` is replaced by the home directory."""
    try:
        return python.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(python)!r} begins with an unknown user; give the whole path") from error


def _not_empty(python: Any) -> Any:
    """Refuse an empty text, which as a path would be the present folder: a variable of a shell was not set, say."""
    if python == "":
        raise ValueError("it is empty; give an interpreter, such as .venv-vllm/bin/python")
    return python


Interpreter = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_from_home)]
NEEDS_PLACE = "give python, an interpreter that has vLLM, or url, a server that runs already: one of the two"
# Keys of a server that the job starts, which would have no effect on one that runs already.
_OF_STARTED = (
    "cache_gib",
    "gpu_memory_utilization",
    "threads",
    "compile",
    "prefill_tokens",
    "tensor_parallel",
    "startup_seconds",
)


class VllmEngineConfig(PooledEngineConfig):
    """`kind = "vllm"`: a vLLM server, which the job starts in an environment of its own, or which runs already."""

    kind: Literal["vllm"] = Field("vllm", description="The kind of engine; each has keys of its own.")
    python: Interpreter | None = Field(
        None,
        description="Interpreter of an environment with vLLM 0.32 or newer, with which the job starts a server for "
        "each policy, and for each of several workers. A relative path begins in the folder of the "
        "configuration file, `~` in the home directory. None: `url` names a server, or a service has the interpreter.",
    )
    url: Urls | None = Field(
        None,
        description="URL of a vLLM server that runs already, for a job of one policy; it has to be started as "
        "`docs/engines.md` says. A list of several, on any machines: each is an inference worker. None: the job starts "
        "them.",
    )
    key_variable: str | None = Field(
        None,
        pattern=_VARIABLE,
        description="Environment variable that holds the key of the server of `url`. The key itself is never in a "
        "configuration. None: the server needs none.",
    )
    weights_dir: Path | None = Field(
        None,
        description="Folder that the job and the server of `url` both see, for new weights. None: shared memory, of "
        "the same machine.",
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
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of the engine's products, weights, keys and values."
    )
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
    prefill_tokens: Positive = Field(2048, description="Most prompt tokens in one forward pass.")
    tensor_parallel: Positive = Field(
        1, description="GPUs that share each server's model; with vLLM's build for CPUs, processes."
    )
    compile: bool | None = Field(
        None,
        description="Whether vLLM compiles the model when it starts, which takes minutes and decodes faster, on GPUs "
        "with CUDA graphs. None: on GPUs.",
    )
    in_flight_updates: InFlightUpdates = "continue"
    seeds: bool = Field(
        False,
        description="Whether vLLM draws from each call's seed. Then prompts are not split over forward passes: vLLM's "
        "build for CPUs ends where a seeded prompt is split.",
    )
    startup_seconds: Seconds = Field(600.0, description="How long a server may take to be ready.")

    @model_validator(mode="after")
    def _is_one_server(self) -> VllmEngineConfig:
        of_url = ("key_variable", "weights_dir", "weights_address")
        _check_place(self.python, self.url, {key: getattr(self, key) for key in of_url})
        # By value: a configuration that was written with its defaults is read again.
        changed = [key for key in _OF_STARTED if getattr(self, key) != VllmEngineConfig.model_fields[key].default]
        if self.url is not None and changed:
            raise ValueError(f"{changed[0]} is of a server that the job starts; leave it out, or leave out url")
        _check_replicas(self.replicas, self.url)
        self._check_transfer()
        return self

    def _check_transfer(self) -> None:
        """Refuse keys that have no effect on the way of new weights, and servers that could not find the trainer."""
        broadcasts = self.weight_transfer != "file"
        if self.weights_address is not None and not broadcasts:
            raise ValueError("weights_address is of weight_transfer = 'gloo' or 'nccl'; leave it out")
        if self.weights_dir is not None and broadcasts:
            raise ValueError("weights_dir is of weight_transfer = 'file'; leave it out")
        if self.weights_address is not None and int(self.weights_address.partition(":")[2] or 0) > MOST_PORT:
            raise ValueError(f"weights_address has a port over {MOST_PORT}")
        far = [url for url in self.url or () if not _is_local(url)]
        if broadcasts and far and self.weights_address is None:
            raise ValueError(
                f"weight_transfer = {self.weight_transfer!r} needs weights_address, by which {far[0]} reaches this "
                "machine over a private network"
            )

    @property
    def pooled(self) -> bool:
        """Return True: a server is watched and replaced, or waited for, also where there is only one."""
        return True

    @property
    def worker_count(self) -> int:
        """Return how many inference workers a job begins with: servers to start, or addresses."""
        return self.replicas if self.url is None else len(self.url)

    @property
    def started_count(self) -> int:
        """Return how many of its inference workers a job starts."""
        return self.replicas if self.url is None else 0


class SglangEngineConfig(PooledEngineConfig):
    """`kind = "sglang"`: an SGLang server that runs already."""

    kind: Literal["sglang"] = Field("sglang", description="The kind of engine; each has keys of its own.")
    url: Urls = Field(
        description="URL of an SGLang server that runs already, for a job of one policy, such as "
        "`http://127.0.0.1:30000`. A list of several, on any machines: each is an inference worker.",
    )
    key_variable: str | None = Field(
        None,
        pattern=_VARIABLE,
        description="Environment variable that holds the key of the server. The key itself is never in a "
        "configuration. None: the server needs none.",
    )
    weights_dir: Path | None = Field(
        None,
        description="Folder that the job and the server both see, for new weights. None: shared memory, of the same "
        "machine.",
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Precision of the weights that are sent.")
    max_batch: Annotated[int, Field(ge=2)] = Field(
        64, description="Requests that are sent to a server at the same time."
    )

    @model_validator(mode="after")
    def _has_an_address_for_each_worker(self) -> SglangEngineConfig:
        _check_replicas(self.replicas, self.url)
        return self

    @property
    def pooled(self) -> bool:
        """Return True: a server is waited for when it is gone, also where there is only one."""
        return True

    @property
    def worker_count(self) -> int:
        """Return how many inference workers a job begins with: one for each address."""
        return len(self.url)

    @property
    def started_count(self) -> int:
        """Return 0, because a job starts no SGLang."""
        return 0


def _is_local(url: str) -> bool:
    """Return whether an address is one of this machine alone."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _check_replicas(replicas: int, urls: tuple[str, ...] | None) -> None:
    """Refuse workers without a server: servers that run already are counted by their addresses."""
    if urls is not None and replicas not in (1, len(urls)):
        raise ValueError(f"replicas is {replicas}, and url names {len(urls)}; give a list of as many addresses")


def _check_place(python: Path | None, url: tuple[str, ...] | None, of_url: dict[str, Any]) -> None:
    """Refuse a configuration that names two servers, or has keys for one that it does not name.

    One that names none is for a service, whose operator has the interpreter; see `require_place`.
    """
    if python is not None and url is not None:
        raise ValueError(NEEDS_PLACE)
    if url is None and (unused := [key for key, value in of_url.items() if value is not None]):
        raise ValueError(f"{unused[0]} is of a server that runs already; leave it out, or give url, and no python")


def check_served(
    engine: VllmEngineConfig | SglangEngineConfig,
    policies: Mapping[str, PolicyConfig],
    deterministic: bool,
    pools: Collection[str],
) -> None:
    """Refuse a job that its engine's servers can't play.

    Args:
        policies: by name.
        deterministic: whether results have to be the same bit for bit.

    Raises:
        ValueError: past versions of whole weights play, several policies are on one server, the job has to be
            deterministic, or adapters alone would be broadcast.
    """
    whose = f"engine.kind = {engine.kind!r}"
    if deterministic:
        raise ValueError(
            f"deterministic = true needs engine.kind = 'embedded': results of {whose} depend on its batches"
        )
    if whole := [name for name in pools if policies[name].adapter is None]:
        raise ValueError(
            f"roles with a pool of past versions need policies.{whole[0]}.adapter with {whose}, whose server has the "
            "whole weights of one version; or take engine.kind = 'embedded'"
        )
    transfer = engine.weight_transfer if isinstance(engine, VllmEngineConfig) else "file"
    if transfer != "file" and all(policy.adapter is not None for policy in policies.values()):
        raise ValueError(
            f"engine.weight_transfer = {transfer!r} is of whole weights, and adapters are sent as folders; leave it out"
        )
    if engine.url is not None and len(policies) > 1:
        raise ValueError(f"a server of engine.url samples from one policy, and there are {len(policies)}")
