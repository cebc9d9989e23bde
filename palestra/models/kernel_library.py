"""Compiles `cpu_kernels.c` with the machine's C compiler, and loads what it has made."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

log = logging.getLogger("palestra.models")
_SOURCE = Path(__file__).with_name("cpu_kernels.c")
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60  # that a compiler may take
# Sums and products may be computed in another order, which lets them be vectors; NaN and infinity keep their meaning.
_FLAGS = "-O3 -march=native -fPIC -fopenmp -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_WIDEST = "-mprefer-vector-width=512"  # which not all compilers know


def kernel_library() -> ctypes.CDLL | None:
    """Return the compiled functions; None, and a warning: this machine can't compile or load them."""
    if sys.platform != "linux":  # elsewhere torch has no OpenMP whose threads could be used as well
        return None
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        log.warning("layers are computed without compiled kernels, and slower: there is no C compiler (cc)")
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="palestra-kernels-", ignore_cleanup_errors=True) as folder:
            return ctypes.CDLL(str(_compiled(compiler, Path(folder))))
    except (OSError, subprocess.SubprocessError) as error:
        said = " ".join(str(getattr(error, "stderr", None) or error).split())[:500]
        log.warning("layers are computed without compiled kernels, and slower: %s", said)
        return None


def _compiled(compiler: str, folder: Path) -> Path:
    """Return a library that was made in a folder.

    Raises:
        subprocess.SubprocessError: the compiler refuses, or takes too long.
        OSError: it can't be started.
    """
    object_file, library = folder / "kernels.o", folder / "kernels.so"
    settings = os.environ | {"LC_ALL": "C"}
    run = functools.partial(
        subprocess.run,
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        env=settings,
        cwd=folder,
    )
    compiling = [compiler, *_FLAGS.split(), "-c", str(_SOURCE), "-o", str(object_file)]
    try:
        run([*compiling, _WIDEST])
    except subprocess.CalledProcessError:
        run(compiling)
    # Linked without OpenMP: its functions are those that torch has loaded, and so are the threads.
    run([compiler, "-shared", str(object_file), "-o", str(library)])
    return library
