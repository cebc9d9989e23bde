"""A job on a remote environment whose process is killed at a message: `env_job_process.py URL RUN_DIR MESSAGE`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from env_servers import KEY
from test_env_wire import TASKS, job

from palestra import train
from palestra_remote import RemoteEnvironment
from palestra_remote.link import SessionLink

if __name__ == "__main__":
    url, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    sent, send = 0, SessionLink.send

    async def killed(self, **message) -> None:
        global sent
        sent += 1
        if sent == number:
            os.kill(os.getpid(), signal.SIGKILL)
        await send(self, **message)

    SessionLink.send = killed
    config = job(folder, environment={"max_concurrency": 1})
    resume = (folder / "run.db").exists()
    train(environment=RemoteEnvironment(url, KEY), tasks=TASKS, config=config, resume=resume, quiet=True)
