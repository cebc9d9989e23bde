"""The program that starts the server of an engine, and ends it with the job, however that ends.

python -I -S supervisor.py [--remove FOLDER]... COMMAND ARGUMENT... It leads a process group of its own, in which all
processes of the server are. When its standard input is closed, because the job says so or has died, or when the server
itself has ended, the whole group is ended, and the folders are removed: sockets, and weights in shared memory. It
imports the standard library alone, because it runs beside the server for all of the job.
"""

import glob
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 10.0  # between asking the group to end and killing it
LAST_SECONDS = 3.0  # for what is left of the group when the server itself has ended


def end_with_the_job(ended: threading.Event, folders: list[str]) -> None:
    """Wait until the job's end of the pipe is closed, and end the group."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    ended.wait(GRACE_SECONDS)
    end_group(folders)


def end_group(folders: list[str]) -> None:
    """Remove the folders, and end the group, this process included.

    Before it is killed, its processes may end by themselves for a moment: Python's own, which removes what the server
    has in shared memory, does so when all others have.
    """
    os.killpg(0, signal.SIGTERM)
    until = time.monotonic() + LAST_SECONDS
    while len(members_of(os.getpgrp())) > 1 and time.monotonic() < until:
        time.sleep(0.02)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def members_of(group: int) -> list[int]:
    """Return the processes of a group that run; none where the system does not tell."""
    found = []
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{folder}/stat", encoding="utf-8", errors="replace") as file:
                state, _, own = file.read().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if int(own) == group and state not in "ZX":
            found.append(int(folder.removeprefix("/proc/")))
    return found


def main() -> None:
    """Run the command until it or the job ends; never returns."""
    # By a handler: a signal that is ignored would be ignored by the server, too.
    signal.signal(signal.SIGTERM, lambda *_: None)
    words, folders = sys.argv[1:], []
    while words[0] == "--remove":
        folders.append(words[1])
        words = words[2:]
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    ended = threading.Event()
    threading.Thread(target=end_with_the_job, args=(ended, folders), daemon=True).start()
    code = server.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    sys.stderr.write(f"the server {how}\n")
    sys.stderr.flush()
    ended.set()
    end_group(folders)


if __name__ == "__main__":
    main()
