"""An environment server whose process is killed at a message: `env_server_process.py PORT MESSAGE`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from env_servers import KEY, Ledger

from palestra.http.server import listen
from palestra_remote import SessionTable
from palestra_remote.app import served_environment


class Killed(Ledger):
    """Kills its process at one of the calls of all its episodes together."""

    calls, at = 0, 0

    def _count(self) -> None:
        Killed.calls += 1
        if Killed.calls == Killed.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, task):
        self._count()
        return super().reset(task)

    def step(self, action):
        self._count()
        return super().step(action)


async def main(port: int) -> None:
    async with served_environment(SessionTable(Killed), KEY, listen("127.0.0.1", port)):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    Killed.at = int(sys.argv[2])
    asyncio.run(main(int(sys.argv[1])))
