"""The program of a rank: python -m palestra.trainer.sharded.rank_process SOCKET, the number of an open socket.

The process answers requests one after another, sends a sign of life every second, and ends when the job closes the
other end of the socket, and so with the job, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from palestra.errors import PalestraError
from palestra.processes import HOSTED, die_with_parent
from palestra.trainer.sharded.wire import Answer, Beat, Request, packed, receive, unpacked

BEAT_SECONDS = 1.0
PROGRAM = "palestra.trainer.sharded.rank_process"
FOLDER = "PALESTRA_RANK_FOLDER"  # of the trainer, in shared memory: removed by a rank whose job has died
_PROCESS = "process-"  # in the folder: begins the name of an empty file of each rank, which its process id ends


class _Talk:
    """The rank's end of the socket, read by one thread and written by two."""

    def __init__(self, end: socket.socket, folder: Path) -> None:
        self._end, self._folder = end, folder
        self._writing = threading.Lock()
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def send(self, message: object) -> None:
        content = packed(message)
        with self._writing:
            self._end.sendall(content)

    def read(self) -> None:
        """Put requests into the queue, and end the process when the job is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.requests.put(receive(self._end))
        others = [] if HOSTED in os.environ else _ranks_here(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        for process in others:  # one that is stopped does not see that the job is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os._exit(1)  # the other threads may be computing, or waiting for ranks that have ended

    def beat(self) -> None:
        """Say that the process lives; not after it was stopped, or while the system swaps."""
        with contextlib.suppress(OSError):
            while True:
                self.send(Beat())
                time.sleep(BEAT_SECONDS)


def _ranks_here(folder: Path) -> list[int]:
    """Return the processes of the trainer's other ranks, each of which has left its id in the folder.

    An id that another program has by now is left out.
    """
    found = []
    for file in folder.glob(f"{_PROCESS}*"):
        process = int(file.name.removeprefix(_PROCESS))
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if process != os.getpid() and PROGRAM.encode() in command:
                found.append(process)
    return found


def main() -> None:
    """Answer requests until the job is gone."""
    if HOSTED in os.environ:  # else a rank outlives a job that was killed, to remove its folder
        die_with_parent()
    # Ctrl-C reaches all processes of a terminal, and SIGTERM those of a group; the job saves before it ends.
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    folder = Path(os.environ[FOLDER])
    with contextlib.suppress(FileNotFoundError):  # the job is gone already, which the socket says, too
        (folder / f"{_PROCESS}{os.getpid()}").touch()
    talk = _Talk(socket.socket(fileno=int(sys.argv[1])), folder)
    for work in (talk.beat, talk.read):  # the first request loads torch in the thread that reads it
        threading.Thread(target=work, name=f"palestra-rank-{work.__name__}", daemon=True).start()
    from palestra.models.device import tune_malloc  # torch comes after the first sign of life

    tune_malloc()
    from palestra.trainer.sharded.group import TakenBack
    from palestra.trainer.sharded.rank import Rank

    rank: Rank | None = None
    while True:
        request = talk.requests.get()
        try:
            if rank is None:
                rank, result = Rank(request.arguments[0]), None
            else:
                result = getattr(rank, request.name)(*request.arguments)
            answer = Answer(result)
        except (TakenBack, PalestraError) as error:
            problem = error.problem if isinstance(error, TakenBack) else error
            answer = Answer(error=problem and _sendable(problem), failed=True)
        except Exception as error:  # noqa: BLE001 - the job ends all ranks
            answer = Answer(error=_sendable(error), failed=True, broken=True, trace=traceback.format_exc())
        talk.send(answer)


def _sendable(error: Exception) -> Exception:
    """Return an error that the job can read: itself, or its name and text."""
    try:
        unpacked(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a class may do anything when its errors are made again
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main()
