"""File systems of their own for tests: small, full, read-only. They need the right to mount one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a file system at `folder` with `mount`'s options; skip the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", *options, str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def small_disk(folder: Path, size: str) -> contextlib.AbstractContextManager[Path]:
    """Mount a file system of a size, such as `4m`, at `folder`."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={size},mode=0700", "palestra-test")


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nothing be written in `folder`."""
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the file system of `folder`, so that nothing more fits in."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()
