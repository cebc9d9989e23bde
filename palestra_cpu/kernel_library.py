"""Compiles this package's C files with the machine's C compiler, and loads the library."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = ("cpu_kernels.c", "attention_kernels.c")
_COMPILERS = ("cc", "gcc", "clang")
# A compiler may take this much processor time, so that what computes does not depend on how busy the machine is. The
# second limit is for one that waits for something that never comes.
_PROCESSOR_SECONDS, _WALL_SECONDS = 60, 1800
_LIMITED = ("/bin/sh", "-c", f'ulimit -t {_PROCESSOR_SECONDS} 2> /dev/null; exec "$@"', "sh")
# Sums and products may be computed in another order, which lets them be vectors; NaN and infinity keep their meaning.
_FLAGS = "-O3 -march=native -fPIC -fopenmp -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_WIDEST = "-mprefer-vector-width=512"  # which not all compilers know


def kernel_library() -> tuple[ctypes.CDLL, str]:
    """Return the compiled functions, and the compiler's name and version.

    Raises:
        OSError: the compiler or the library can't be used.
        subprocess.SubprocessError: the compiler fails, or takes too long.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no C compiler ({_COMPILERS[0]})")
    with tempfile.TemporaryDirectory(prefix="palestra-kernels-", ignore_cleanup_errors=True) as folder:
        said = _run([compiler, "--version"], Path(folder)).stdout.strip()
        return ctypes.CDLL(str(_compiled(compiler, Path(folder)))), said.partition("\n")[0] or compiler


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; errors are those of `kernel_library`."""
    return subprocess.run(
        [*_LIMITED, *command],
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_WALL_SECONDS,
        env=os.environ | {"LC_ALL": "C"},
        cwd=folder,
    )


def _compiled(compiler: str, folder: Path) -> Path:
    """Return a library compiled into a folder; errors are those of `kernel_library`."""
    library = folder / "kernels.so"

    def compile_file(name: str) -> str:
        compiling = [compiler, *_FLAGS.split(), "-c", str(Path(__file__).with_name(name))]
        try:
            _run([*compiling, _WIDEST], folder)
        except subprocess.CalledProcessError:
            _run(compiling, folder)
        return str(Path(name).with_suffix(".o"))

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_file, _SOURCES))
    # Linked without OpenMP: its functions are those that torch has loaded, and so are the threads.
    _run([compiler, "-shared", *objects, "-o", str(library), "-lm"], folder)
    return library
