"""Sessions of an environment server, one after another and many at a time: what they leave behind.

    python bench/env_sessions.py --sessions 10000 --together 500

Each session is made, plays an episode of two actions, and is closed. Printed are processes, descriptors and resident
memory of the server and of the client, after a tenth of the sessions and after all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import time
from typing import Any

import psutil
import uvloop
from env_wire import KEY, Corridor, play, processor_seconds

from palestra.http.server import listen, url_of
from palestra_remote import RemoteEnvironment, SessionLimits, SessionTable
from palestra_remote.app import served_environment


def serve(together: int, pipe: Any) -> None:
    """Serve until `end` comes through the pipe; its address goes through it first."""

    async def run() -> None:
        listener = listen("127.0.0.1", 0)
        table = SessionTable(lambda: Corridor(2), SessionLimits(sessions=together))
        async with served_environment(table, KEY, listener):
            pipe.send(url_of(listener))
            while True:
                while not await asyncio.to_thread(pipe.poll, 0.2):
                    pass
                if pipe.recv() == "end":
                    return
                gc.collect()
                pipe.send((len(table), processor_seconds()))

    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run())


def state(process: psutil.Process) -> dict[str, float]:
    """Return what a process holds."""
    return {
        "children": len(process.children(recursive=True)),
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "MiB": round(process.memory_info().rss / 2**20, 1),
    }


async def one(environment: RemoteEnvironment) -> None:
    """Play one session from its beginning to its end."""
    await environment.setup()
    await play(environment, [])
    await environment.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000, help="in each of the two ways")
    parser.add_argument("--together", type=int, default=500, help="at the same time, in the second way")
    arguments = parser.parse_args()
    pipe, other = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(arguments.together, other), daemon=True)
    server.start()
    make = RemoteEnvironment(pipe.recv(), KEY)
    watched = {"server": psutil.Process(server.pid), "client": psutil.Process(os.getpid())}

    def show(what: str, done: int, seconds: float) -> None:
        gc.collect()
        pipe.send("state")
        open_sessions, _ = pipe.recv()
        row = {"sessions": what, "done": done, "seconds": round(seconds, 1), "open": open_sessions}
        print(json.dumps(row | {name: state(process) for name, process in watched.items()}), flush=True)

    async def run() -> None:
        for together in (1, arguments.together):
            name, tenth = f"{together} at a time", arguments.sessions // 10
            begun, done = time.perf_counter(), 0
            while done < arguments.sessions:
                await asyncio.gather(*(one(make()) for _ in range(together)))
                done += together
                if done == max(tenth, together):
                    show(name, done, time.perf_counter() - begun)
            await asyncio.sleep(1.0)
            show(name, done, time.perf_counter() - begun)

    show("none", 0, 0.0)
    uvloop.run(run())
    pipe.send("end")
    server.join()


if __name__ == "__main__":
    main()
