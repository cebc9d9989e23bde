"""Compiles `cpu_kernels.c` with the machine's C compiler, and loads what it has made."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("cpu_kernels.c")
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60  # that a compiler may take
# Sums and products may be computed in another order, which lets them be vectors; NaN and infinity keep their meaning.
_FLAGS = "-O3 -march=native -fPIC -fopenmp -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_WIDEST = "-mprefer-vector-width=512"  # which not all compilers know


def kernel_library() -> ctypes.CDLL:
    """Return the compiled functions.

    Raises:
        OSError: there is no compiler, or it can't be started, or what it has made can't be loaded.
        subprocess.SubprocessError: the compiler refuses, or takes too long.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no C compiler ({_COMPILERS[0]})")
    with tempfile.TemporaryDirectory(prefix="palestra-kernels-", ignore_cleanup_errors=True) as folder:
        return ctypes.CDLL(str(_compiled(compiler, Path(folder))))


def _compiled(compiler: str, folder: Path) -> Path:
    """Return a library that was made in a folder; errors are those of `kernel_library`."""
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
