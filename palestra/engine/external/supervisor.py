"""The program that starts the server of an engine, and ends it with the job, however that ends.

python -I -S supervisor.py [--remove FOLDER]... COMMAND ARGUMENT... It leads a process group of its own, in which all
processes of the server are. When its standard input is closed, because the job says so or has died, or when the server
itself has ended, the whole group is ended, and the folders are removed: sockets, and weights in shared memory. It
imports the standard library alone, because it runs beside the server for all of the job.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 10.0  # between asking the group to end and killing it


def end_with_the_job(ended: threading.Event, folders: list[str]) -> None:
    """Wait until the job's end of the pipe is closed, and end the group."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    ended.wait(GRACE_SECONDS)
    end_group(folders)


def end_group(folders: list[str]) -> None:
    """Remove the folders, and kill the group, this process included."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


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
