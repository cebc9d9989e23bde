"""What computes a job's numbers: everything that two starts of one run may choose differently on their machines.

A deterministic run keeps it with its steps, and goes on only with the same (docs/explanation/architecture.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from palestra import __version__
from palestra.errors import ConfigError

# Read by the libraries that multiply matrices; each may change the order of sums.
VARIABLES = (
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE",
)  # fmt: skip
KERNELS, PROBLEM = "kernels", "kernels_problem"


def numerics(kernels: bool) -> dict[str, str]:
    """Return what computes in this process, by the name of the choice. `kernels`: it computes bfloat16 on a CPU, with
    compiled kernels.
    """
    import torch

    # Of torch not what its package says, which leaves out for which card it was built.
    found = {"palestra": __version__, "torch": torch.__version__, "transformers": version("transformers")}
    found["processor"] = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    found["variables"] = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    if kernels:
        from palestra.models.kernels import kernels as installed

        found[KERNELS], found[PROBLEM] = installed().numerics()
    return found


def check_numerics(before: Mapping[str, str], now: Mapping[str, str], whose: str) -> None:
    """Raise ConfigError if a deterministic job's numbers would be computed in two ways. `before` are those of the steps
    so far, or of the job's own process; the message says `whose` numbers they made.
    """
    if differing := differences(before, now):
        raise ConfigError(
            f"deterministic = true, and {whose} with {differing}; give this machine what there was, or begin a new run"
        )


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe the differences between two results of `numerics`, ignoring reasons; "": they are equal."""
    names = [name for name in {**before, **now} if name != PROBLEM and before.get(name) != now.get(name)]
    said = [f"{name} {before.get(name) or 'none'}, here {now.get(name) or 'none'}" for name in names]
    why = f" ({now[PROBLEM]})" if KERNELS in names and now.get(PROBLEM) else ""
    return "; ".join(said) + why


def _processor() -> str:
    """Return the processor's model as the system names it."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return os.uname().machine
    first = re.findall(r"^([^\t\n]+?)\s*: (.*)$", said.partition("\n\n")[0], re.MULTILINE)
    known: dict[str, str] = {
        key: value for key, value in first if key in ("model name", "cpu family", "model", "stepping")
    }
    if "model name" not in known:
        return os.uname().machine
    details = ", ".join(f"{key.removeprefix('cpu ')} {value}" for key, value in known.items() if key != "model name")
    return known["model name"] + (f" ({details})" if details else "")
