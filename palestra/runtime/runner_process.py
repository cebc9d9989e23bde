"""Runners as processes of this machine: `start_process` in the job, and the program that such a process runs.

python -m palestra.runtime.runner_process URL NAME CONCURRENCY, with the key in PALESTRA_API_KEY. The process ends when
its standard input is closed, and so with the job, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

from palestra.errors import PalestraError
from palestra.runtime.runner_fleet import RunnerDied, RunnerOrder
from palestra.threads import in_thread

KEY_VARIABLE = "PALESTRA_API_KEY"


async def start_process(order: RunnerOrder, worker_id: str) -> None:
    """Run a runner as a process, until the job is over. See `RunnerStarter`.

    Args:
        worker_id: the name under which it claims episodes.

    Raises:
        RunnerDied: the process has ended otherwise.
    """
    process = _started(order, worker_id)
    try:
        code = await in_thread(process.wait)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
    if code < 0:
        raise RunnerDied(f"was killed by {signal.Signals(-code).name}")
    if code > 0:
        raise RunnerDied(f"ended with code {code}")


def _started(order: RunnerOrder, worker_id: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "palestra.runtime.runner_process", order.url, worker_id, str(order.concurrency)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, KEY_VARIABLE: order.key()})


def _end_with_the_job() -> None:
    """End this process when the job's process has closed its end of the pipe, or has died."""
    os.read(0, 1)  # not by `sys.stdin`, whose lock a thread that waits would hold at the end of the process
    os._exit(1)


def main() -> int:
    """Play until the job is over; returns the exit code."""
    from palestra.runtime.runner import play_environment
    from palestra.terminal import say

    url, worker_id, concurrency = sys.argv[1:]
    # Ctrl-C reaches all processes of a terminal; the job decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_job, name="palestra-job-watch", daemon=True).start()
    try:
        asyncio.run(play_environment(url, os.environ.pop(KEY_VARIABLE), worker_id, int(concurrency)))
    except PalestraError as error:
        say(f"{worker_id}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
