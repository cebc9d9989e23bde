"""Count what runs for one model call, one claim, one end and one training step: functions, calls of them, and files.

`python scripts/way.py` starts a job with the fake engine in this process, and sends requests over a plain socket. A
profiler counts every function that starts or resumes in the job's threads: of the package, and other Python. The first
requests are not counted; of each function the median of the others is, so that a timer that fires meanwhile does not
count. `--list` prints the functions. A step is what follows the last end of its episodes, up to the next claim.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import palestra
from palestra.config import parse_config
from palestra.runtime.local import local_job
from palestra.runtime.local_job import LocalJob
from palestra.types.records import Task

ROOT = f"{Path(palestra.__file__).parent}/"
WARM, COUNTED = 3, 9  # groups of one episode and one call that are played
GROUP = 2
SYSTEM = "You help people who write programs, and you say in few words what to do. "
USER = "Read the page that is shown below and tell me which link comes first, and why. "
Counts = Counter[CodeType]
running: Counts | None = None  # what is being counted now


def watch(frame: FrameType, event: str, _argument: object) -> None:
    """Count a function that starts or resumes."""
    if event == "call" and running is not None:
        running[frame.f_code] += 1


@contextmanager
def counted(into: list[Counts]) -> Iterator[None]:
    """Count what runs in the job's threads during the block."""
    global running
    found: Counts = Counter()
    running = found
    try:
        yield
    finally:
        running = None
        into.append(found)


class Client:
    """One connection, without an HTTP library: nothing of the client is counted."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self._answers = self._socket.makefile("rb")

    def post(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and return its answer."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)
        status, size = self._answers.readline(), 0
        while (line := self._answers.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        answer = self._answers.read(size)
        if not status.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{path}: {status!r} {answer!r}")
        found: dict[str, Any] = json.loads(answer)
        return found


def play(job: LocalJob) -> dict[str, list[Counts]]:
    """Play the episodes of all steps, and return what ran for each."""
    host, _, port = job.url.removeprefix("http://").rpartition(":")
    client, key = Client((host, int(port))), job.plane.keys.job_key
    found: dict[str, list[Counts]] = {"chat call": [], "claim": [], "end": [], "training step": []}
    settle = 0.05  # seconds in which what a request has set off comes to its end
    for step in range(WARM + COUNTED):
        for sample in range(GROUP):
            claim = {"worker_id": "w", "request_id": f"r{step}.{sample}", "wait_seconds": 30}
            if step == 0 or sample > 0:
                time.sleep(settle)
            with counted(found["claim"] if sample else []):
                episode = client.post("/claim_episode", key, claim)["episode"]
            own = episode["api_key"]
            messages = [{"role": "system", "content": SYSTEM * 5}, {"role": "user", "content": USER * 5}]
            call = {"model": episode["model"], "messages": messages, "max_tokens": 32, "logprobs": True}
            client.post("/v1/chat/completions", own, call)
            time.sleep(settle)
            with counted(found["chat call"]):
                client.post("/v1/chat/completions", own, call)
            time.sleep(settle)
            end = {"episode_id": episode["episode_id"], "reward": float(sample)}
            with counted(found["end"] if sample + 1 < GROUP else found["training step"]):
                client.post("/end_episode", own, end)
                if sample + 1 == GROUP:
                    while job.progress.step <= step:  # on a busy machine a step takes long
                        time.sleep(settle)
                    time.sleep(0.3)
    return found


def typical(runs: list[Counts]) -> Counts:
    """Return the median count of each function, over the runs after the warm ones."""
    kept = runs[WARM:]
    medians = {code: int(statistics.median(run[code] for run in kept)) for code in set().union(*kept)}
    return Counter({code: number for code, number in medians.items() if number})


async def count(folder: str, ready: "asyncio.Future[Any]") -> None:
    """Run the job until its steps are trained; `play` plays its episodes in a thread that is not watched."""
    config = parse_config(
        {
            "name": "way",
            "run_dir": folder,
            "steps": WARM + COUNTED,
            "rollout": {"groups_per_step": 1, "group_size": GROUP},
            "checkpoint": {"every_steps": 1_000_000},
            "engine": {"kind": "fake"},
            "server": {"port": 0},
        }
    )
    async with local_job(config, lambda *_: None) as job:
        tasks = [Task(task_id=f"t{n}", data={"question": f"What is {n} + {n}? " * 10}) for n in range(8)]
        await job.plane.store.tasks.push("train", tasks, "chunk")
        await job.plane.store.tasks.seal()
        ready.get_loop().call_soon_threadsafe(ready.set_result, job)
        await job.run()
        await job.linger()


async def measured() -> dict[str, list[Counts]]:
    """Run the job in a watched thread, and play its episodes from this one."""
    ready: asyncio.Future[LocalJob] = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(watch)
        thread = threading.Thread(target=lambda: asyncio.run(count(folder, ready)))
        thread.start()
        found = play(await ready)
        thread.join()
    return found


def main() -> int:
    """Print the table, and with `--list` the functions of one kind of request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=("chat call", "claim", "end", "training step"), help="name its functions")
    arguments = parser.parse_args()
    found = {name: typical(runs) for name, runs in asyncio.run(measured()).items()}
    print("| | functions | calls of them | files | calls of other Python functions |\n|---|--:|--:|--:|--:|")
    for name, counts in found.items():
        own = Counter({code: number for code, number in counts.items() if code.co_filename.startswith(ROOT)})
        files = {code.co_filename for code in own}
        print(f"| {name} | {len(own)} | {own.total()} | {len(files)} | {counts.total() - own.total()} |")
        if name == arguments.list:
            order = sorted(own, key=lambda code: (code.co_filename, code.co_firstlineno))
            lines = [f"{c.co_filename.removeprefix(ROOT)}: {c.co_qualname} {own[c]}" for c in order]
    print("\n".join(lines) if arguments.list else "", end="\n" if arguments.list else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
