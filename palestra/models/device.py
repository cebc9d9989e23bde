"""The machine's devices and memory, and malloc settings that keep freed memory for the next pass."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from palestra.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from palestra.config import TrainerConfig

DeviceName = Literal["auto", "cpu", "cuda"]


MEMORY_VARIABLE = "PALESTRA_MEMORY_GIB"  # set by the control plane, which ends a job that uses more
TRAINED_BYTES = 16  # a trained parameter: weight, gradient and two moments in float32
BYTES = {"bfloat16": 2, "float32": 4}  # a parameter that is only read
CORES_VARIABLE = "PALESTRA_CORES"  # cores that the processes of a job may use; unset: all
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


def device_of(name: DeviceName, setting: str) -> torch.device:
    """Return the torch device of a configured name; `auto` is the GPU if there is one."""
    import torch  # here alone: a server without a model of its own asks for memory, and loads no torch

    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError(f"{setting} is 'cuda', and torch sees no CUDA device here; use 'cpu' or 'auto'")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def check_offload(config: TrainerConfig, device: torch.device) -> None:
    """Raise ConfigError if CPU offload is configured for a trainer that computes on a CPU."""
    if config.cpu_offload and device.type == "cpu":
        raise ConfigError("trainer.cpu_offload is for CUDA devices, and this trainer is on CPUs; leave it out")


def multiplies_bfloat16() -> bool:
    """Return whether this processor has fast bfloat16 products: without AVX-512 they are 50 times slower."""
    import torch

    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(there and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def precision_of(dtype: str, device: torch.device) -> torch.dtype:
    """Return the precision of products on a device: float32 on a processor without fast bfloat16 products.

    Deterministic jobs keep the configured precision, because slow bfloat16 products give a row the same bits in any
    batch.
    """
    import torch

    slow = dtype == "bfloat16" and device.type == "cpu" and not multiplies_bfloat16()
    if slow and not torch.are_deterministic_algorithms_enabled():
        return torch.float32
    found: torch.dtype = getattr(torch, dtype)
    return found


def reproducible_products() -> None:
    """Make products give a row the same bits in batches of any size, on Intel processors.

    MKL (float32) chooses kernels by shape unless its strict conditional numerical reproducibility is on; oneDNN
    (bfloat16) does so when it uses AMX tiles. Both read these variables once, before the first product of the process.
    `check_determinism` finds out whether a machine's products keep the promise.
    """
    processor = _processor()
    if "GenuineIntel" in processor:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    if "amx_bf16" in processor:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # the best one without AMX


def make_deterministic(deterministic: bool) -> None:
    """Make this process compute reproducibly for a deterministic job. Call it before the first product."""
    if deterministic:
        import torch

        reproducible_products()
        torch.use_deterministic_algorithms(True)


def _processor() -> str:
    """Return the system's description of the processor, or an empty text."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def tune_malloc() -> bool:
    """Make glibc's malloc keep freed memory, in one heap for all threads started later; False: not glibc.

    Otherwise page faults on large temporaries take a third of a training step (docs/benchmarks.md). Call it before the
    first thread starts: threads keep using earlier heaps in turn, each of which keeps what the largest temporaries
    need, about half as much memory again.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return all(mallopt(*setting) for setting in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)))


def return_freed_memory() -> None:
    """Return malloc's free memory to the system, as far as the C library can.

    Steps of different sizes fragment the heap, which would grow by about 30 MB a step. Returning memory makes a step
    one or two seconds longer, so it is done only now and then.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc; None: the C library does not have it."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


def available_cores() -> int:
    """Return how many cores this process may use: `PALESTRA_CORES`, or all that the system grants."""
    return len(allowed_cores())


def allowed_cores() -> list[int]:
    """Return the indices of the cores that this process may use; see `available_cores`."""
    here = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    given = os.environ.get(CORES_VARIABLE)
    return list(here)[: None if given is None else max(int(given), 1)]


def memory_bytes() -> int:
    """Return how many bytes of memory this process may use: `PALESTRA_MEMORY_GIB`, or all of the machine's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = os.environ.get(MEMORY_VARIABLE)
    return machine if given is None else min(machine, int(float(given) * 2**30))


def available_bytes(*, swap: bool = False) -> int:
    """Return the memory, in bytes, that this process can still allocate: the kernel's estimate, or less if the job is
    limited. With `swap` that counts too: a job then runs slowly instead of being killed.
    """
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if Path("/proc/meminfo").exists() else []
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    if "MemAvailable" not in sizes:
        return memory_bytes()
    more = sizes.get("SwapFree", 0) if swap else 0
    # What the job may use of the machine's memory does not grow by its swap space.
    most = memory_bytes() if MEMORY_VARIABLE in os.environ else memory_bytes() + more
    return min(sizes["MemAvailable"] + more, most)
