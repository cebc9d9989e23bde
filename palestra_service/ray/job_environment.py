"""The environment variables of a job's process: only named ones, so that no secret of the operator reaches a job."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, MutableMapping

from palestra.process.child import MALLOC_VARIABLE

NAMES = frozenset(
    (
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "PALESTRA_CACHE",
        "LD_LIBRARY_PATH",
        MALLOC_VARIABLE,
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONUNBUFFERED",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_ENDPOINT",
        "TRANSFORMERS_OFFLINE",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
    )
)
PREFIXES = ("LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "CUDA_", "NVIDIA_", "NCCL_", "RAY_")
# Variables that hold folders. A job's process has another working directory, so relative ones are made absolute.
_FOLDERS = ("PYTHONPATH", "XDG_CACHE_HOME", "PALESTRA_CACHE", "HF_HOME", "HF_HUB_CACHE")


def job_environment(environment: Mapping[str, str], more: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of `environment` allowed in a job's process, with absolute folders."""
    found = {name: value for name, value in environment.items() if _passes(name, more)}
    for name in _FOLDERS:
        if name in found:
            parts = found[name].split(os.pathsep)
            found[name] = os.pathsep.join(
                part if part.startswith("~") else os.path.abspath(part) for part in parts if part
            )
    if "HF_TOKEN" not in found:  # the token in the operator's home opens models that tenants have no right to
        found["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
    return found


def limit_environment(environment: MutableMapping[str, str], more: Collection[str] = ()) -> None:
    """Remove variables from `environment` that `job_environment` does not return.

    For processes of a cluster that Palestra has not started. The kernel still shows their initial variables
    (`/proc/PID/environ`). `environment`: the process's own, changed in place.
    """
    kept = job_environment(environment, more)
    for name in [name for name in environment if name not in kept]:
        del environment[name]
    environment.update(kept)


def _passes(name: str, more: Collection[str]) -> bool:
    return name in NAMES or name in more or name.startswith(PREFIXES)
