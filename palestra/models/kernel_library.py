"""Compiles the C files beside it with the machine's C compiler, and loads what it has made."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = ("cpu_kernels.c", "attention_kernels.c")
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
    library = folder / "kernels.so"
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

    def compile_file(name: str) -> str:
        compiling = [compiler, *_FLAGS.split(), "-c", str(Path(__file__).with_name(name))]
        try:
            run([*compiling, _WIDEST])
        except subprocess.CalledProcessError:
            run(compiling)
        return str(Path(name).with_suffix(".o"))

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_file, _SOURCES))
    # Linked without OpenMP: its functions are those that torch has loaded, and so are the threads.
    run([compiler, "-shared", *objects, "-o", str(library), "-lm"])
    return library
