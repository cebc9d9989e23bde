"""`Program`: a process that inherits only the descriptors that it is given, under any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

_NOBODY = 65534  # the limit of processes does not hold for root, so root's sandboxes run as this user


class Program:
    """A running child process.

    asyncio's processes cannot be used: jobs run on uvloop, which does not support `user`, and passes on every
    inheritable descriptor of the job.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Take a started process; `Program.start` starts one."""
        self._process = process
        self.pid = process.pid
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = self._loop.create_future()
        # A thread and no task: a killed process is waited for to its end, also where all tasks were cancelled.
        threading.Thread(target=self._reap, name="palestra-sandbox", daemon=True).start()

    def _reap(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits for it any more
            self._loop.call_soon_threadsafe(self._end.set_result, code)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        pass_fds: Iterable[int],
        variables: Mapping[str, str],
    ) -> Self:
        """Start a program in its own session; if this process is root's, as the user `nobody`.

        Args:
            stdout: descriptor for output and errors.
            variables: all of its environment variables.
        """
        as_root = os.geteuid() == 0
        return cls(
            subprocess.Popen(  # in the loop's thread, because bubblewrap ends with the thread that started it
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                env=dict(variables),
                user=_NOBODY if as_root else None,
                group=_NOBODY if as_root else None,
                extra_groups=[] if as_root else None,
            )
        )

    @property
    def returncode(self) -> int | None:
        """Return the exit code, or minus the signal; None: the process runs, or its end is not known here yet."""
        return self._process.returncode if self._end.done() else None

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code, or minus the signal."""
        return await asyncio.shield(self._end)
