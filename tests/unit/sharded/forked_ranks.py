"""Rank processes that are forked from one that has imported everything: tests of losses start dozens of them.

A rank does the same afterwards as one that was started the usual way, which other tests do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest
import transformers.models.llama.modeling_llama  # noqa: F401 - what ranks load, so that it is loaded once
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: F401

import palestra.models.loading  # noqa: F401
import palestra_sharded.rank  # noqa: F401
from palestra.process.child import LocalProcess
from palestra_sharded.processes import _main

PROGRAM = "palestra_sharded.processes"


class _Popen:
    """A process of multiprocessing, with the methods of `subprocess.Popen` that a `LocalProcess` uses."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process, self.pid = process, process.pid
        self._reading = threading.Lock()  # the exit code can be read once: a second reader would be told 255
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        with self._reading:
            self._process.join()
            self._code = self._process.exitcode
            return self._code


def _run(connection: socket.socket, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    sys.argv = [PROGRAM, str(connection.detach())]
    _main()


_first = os.getpid()  # of the process that has imported this module


def _has_imported() -> None:
    assert _first != os.getpid()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def import_everything() -> None:
    """Wait until the process from which ranks are forked has imported what they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # it has no other way to find the modules of tests
        process = _context().Process(target=_has_imported)
        process.start()
    process.join()
    assert process.exitcode == 0, "it has not imported this module itself, and each rank would do so"


async def start_forked(module: str, variables: Mapping[str, str]) -> LocalProcess:
    """Start a rank; see `ProcessStarter`."""
    assert module == PROGRAM
    ours, theirs = socket.socketpair()
    with theirs:
        process = _context().Process(target=_run, args=(theirs, dict(variables)))
        process.start()
    popen: Any = _Popen(process)
    return LocalProcess(popen, ours)
