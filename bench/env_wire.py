"""An environment over a socket beside the same one in process: round trips, messages a second, processor time.

python bench/env_wire.py                     # client and server are two processes of this machine
python bench/env_wire.py --sessions 1 64 256
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import uvloop

from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.envs.environment import Reset, Step
from palestra.http.server import listen, url_of
from palestra.types.messages import text_message
from palestra_remote import RemoteEnvironment, SessionLimits, SessionTable
from palestra_remote.app import served_environment

KEY = "bench-key"
ACTION = text_message("assistant", "I go to the right, and take what lies there." * 2)


class Corridor(Environment):
    """Shows a text of 400 characters at each of its steps, and does nothing else."""

    blocking = False

    def __init__(self, steps: int) -> None:
        self._left = self._steps = steps

    def reset(self, task: Mapping[str, Any]) -> Reset:
        """Begin an episode."""
        self._left = self._steps
        return "You stand in a corridor. " * 16, {}

    def step(self, action: str) -> Step:
        """Go on."""
        self._left -= 1
        return "You stand in a corridor. " * 16, 0.0, self._left == 0, False, {}


def processor_seconds() -> float:
    """Return the processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(steps: int, sessions: int, pipe: Any) -> None:
    """Serve until the second message comes through the pipe; the first one asks for the processor time."""

    async def run() -> None:
        listener = listen("127.0.0.1", 0)
        table = SessionTable(lambda: Corridor(steps), SessionLimits(sessions=sessions))
        async with served_environment(table, KEY, listener):
            pipe.send(url_of(listener))
            while not await asyncio.to_thread(pipe.poll, 0.2):
                pass
            pipe.recv()
            pipe.send(processor_seconds())
            await asyncio.to_thread(pipe.recv)

    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run())


async def play(environment: ConcurrentEnvironment, trips: list[float]) -> None:
    """Play one episode, and append the seconds of each action and its observation."""
    await environment.reset({})
    observation = await environment.observe()
    while not observation.is_last:
        begun = time.perf_counter()
        environment.act(observation.id, ACTION)
        observation = await environment.observe()
        trips.append(time.perf_counter() - begun)


async def measure(make: Callable[[], ConcurrentEnvironment], sessions: int) -> tuple[list[float], float]:
    """Play an episode in each of several environments at the same time; return the round trips, and the seconds."""
    made = [make() for _ in range(sessions)]
    await asyncio.gather(*(environment.setup() for environment in made))
    trips: list[float] = []
    begun = time.perf_counter()
    await asyncio.gather(*(play(environment, trips) for environment in made))
    seconds = time.perf_counter() - begun
    await asyncio.gather(*(environment.close() for environment in made))
    return trips, seconds


def _in_process(steps: int) -> ConcurrentEnvironment:
    return SerialEnvironment(Corridor(steps))


def row(name: str, sessions: int, trips: Sequence[float], seconds: float, used: float) -> dict[str, object]:
    """Return one line of the table."""
    quantiles = statistics.quantiles(trips, n=100)
    return {
        "form": name,
        "sessions": sessions,
        "round trips": len(trips),
        "p50 ms": round(quantiles[49] * 1e3, 3),
        "p99 ms": round(quantiles[98] * 1e3, 3),
        "messages/s": round(2 * len(trips) / seconds),
        "CPU ms a round trip": round(used / len(trips) * 1e3, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--round-trips", type=int, default=20_000, help="of all sessions together")
    arguments = parser.parse_args()
    for sessions in arguments.sessions:
        steps = max(10, arguments.round_trips // sessions)
        used = processor_seconds()
        trips, seconds = uvloop.run(measure(partial(_in_process, steps), sessions))
        print(json.dumps(row("in process", sessions, trips, seconds, processor_seconds() - used)), flush=True)
        pipe, other = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(steps, sessions, other), daemon=True)
        server.start()
        url = pipe.recv()
        used = processor_seconds()
        trips, seconds = uvloop.run(measure(RemoteEnvironment(url, KEY), sessions))
        used = processor_seconds() - used
        pipe.send("how much?")
        used += pipe.recv()
        pipe.send("end")
        server.join()
        print(json.dumps(row("remote, both sides", sessions, trips, seconds, used)), flush=True)


if __name__ == "__main__":
    main()
