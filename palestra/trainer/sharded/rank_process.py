"""The program of a rank: python -m palestra.trainer.sharded.rank_process SOCKET, the number of an open socket.

The process answers calls one after another and sends a heartbeat every second. It ends when the job closes its end of
the socket, for whatever reason.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from palestra.process.channel import Beat, BlockingChannel, Call
from palestra.process.child import HOSTED, die_with_parent

BEAT_SECONDS = 1.0
PROGRAM = "palestra.trainer.sharded.rank_process"
FOLDER = "PALESTRA_RANK_FOLDER"  # of the trainer, in shared memory: removed by a rank whose job has died
_PROCESS = "process-"  # in the folder: begins the name of an empty file of each rank, which its process id ends


def _read(channel: BlockingChannel, calls: queue.SimpleQueue[Call], folder: Path) -> None:
    """Put calls into the queue; end the process when the job closes the connection."""
    for message in channel.messages():
        if isinstance(message, Call):
            calls.put(message)
    others = [] if HOSTED in os.environ else _ranks_here(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for process in others:  # one that is stopped does not see that the job is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(1)  # the other threads may be computing, or waiting for ranks that have ended


def _beat(channel: BlockingChannel) -> None:
    """Say that the process lives; not after it was stopped, or while the system swaps."""
    with contextlib.suppress(OSError):
        while True:
            channel.send(Beat())
            time.sleep(BEAT_SECONDS)


def _ranks_here(folder: Path) -> list[int]:
    """Return the pids of the trainer's other ranks, which write them into the folder; reused pids are left out."""
    found = []
    for file in folder.glob(f"{_PROCESS}*"):
        process = int(file.name.removeprefix(_PROCESS))
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if process != os.getpid() and PROGRAM.encode() in command:
                found.append(process)
    return found


def _main() -> None:
    """Answer calls until the job closes the connection."""
    if HOSTED in os.environ:  # else a rank outlives a job that was killed, to remove its folder
        die_with_parent()
    # Ctrl-C reaches all processes of a terminal, and SIGTERM those of a group; the job saves before it ends.
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    folder = Path(os.environ[FOLDER])
    with contextlib.suppress(FileNotFoundError):  # the job is gone already, which the socket says, too
        (folder / f"{_PROCESS}{os.getpid()}").touch()
    channel, calls = BlockingChannel(socket.socket(fileno=int(sys.argv[1]))), queue.SimpleQueue[Call]()
    threading.Thread(target=_beat, args=(channel,), name="palestra-rank-beat", daemon=True).start()
    threading.Thread(target=_read, args=(channel, calls, folder), name="palestra-rank-read", daemon=True).start()
    from palestra.models.device import tune_malloc  # torch comes after the first sign of life

    tune_malloc()
    from palestra.process.stub import answer_of
    from palestra.trainer.sharded.rank import Rank

    rank = Rank()
    while True:
        channel.send(answer_of(rank, calls.get()))


if __name__ == "__main__":
    _main()
