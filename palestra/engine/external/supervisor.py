"""The program that starts the server of an engine, and ends it with the job, however that ends.

python -I -S supervisor.py COMMAND ARGUMENT... It leads a process group of its own, in which all processes of the server
are. When its standard input is closed, because the job says so or has died, or when the server itself has ended, the
whole group is ended. It imports the standard library alone, because it runs beside the server for all of the job.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 10.0  # between asking the group to end and killing it


def end_with_the_job(ended: threading.Event) -> None:
    """Wait until the job's end of the pipe is closed, and end the group."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    ended.wait(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command until it or the job ends; never returns."""
    # By a handler: a signal that is ignored would be ignored by the server, too.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    ended = threading.Event()
    threading.Thread(target=end_with_the_job, args=(ended,), daemon=True).start()
    code = server.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    sys.stderr.write(f"the server {how}\n")
    sys.stderr.flush()
    ended.set()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
