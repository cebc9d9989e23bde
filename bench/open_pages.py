"""What ten open pages cost a job: processor time of the server, and the time of a step of a job that serves itself.

    python bench/open_pages.py                       # processor time of a server of nothing but the page
    python bench/open_pages.py --model tiny-random   # time and processor time of a step of a real job

The pages are a process of their own, of low priority, because the people who look have machines of their own. Each
holds a stream of events, as every view of the page does; two have the findings open, and ask for them after each step.
Nothing else is asked while a page stays open.

The server of nothing but the page runs beside a process that writes steps as a job does: 64 episodes, a row of 45
metrics and an event every `STEP_SECONDS`. In both measurements the pages are open and closed in turns of `STRETCH`
steps, and each turn with pages is compared with the mean of the two turns around it, so that whatever else the machine
does, and any drift, falls on both alike. The first step of a turn, in which the pages are opened or closed, counts for
neither. The intervals hold 95 % of the means of samples that are drawn with replacement from these comparisons.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from palestra.config import dump_config, parse_config
from palestra.disk import RUN_LOCK
from palestra.store import RunStore, open_run_store
from palestra.types.records import EpisodeEnd, Task

PAGES, WITH_FINDINGS, STRETCH = 10, 2, 4
STEP_SECONDS = 4.0  # about what a step of SmolLM2-135M takes on two cores
EPISODES, GROUP, METRICS = 64, 8, 45
ASK_SECONDS, MOST_QUESTIONS = 1.0, 6  # see findings.js
SAMPLES = 2000  # of which an interval is made


class Pages:
    """Ten pages, in a process of their own, which is there before the first of them is opened."""

    def __init__(self, port: int, key: str, run: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_look, args=(port, key, run, theirs), daemon=True)
        self._process.start()
        self._ours.recv()

    def turn(self, on: bool) -> None:
        """Open or close all of them."""
        self._ours.send(on)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _look(port: int, key: str, run: str, commands: Connection) -> None:
    os.nice(19)

    async def all_of_them() -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the job is over
            await asyncio.gather(*(_page(port, key, run, number < WITH_FINDINGS) for number in range(PAGES)))

    async def obey() -> None:
        pages: asyncio.Task[None] | None = None
        commands.send("ready")
        while True:
            on = await asyncio.get_running_loop().run_in_executor(None, commands.recv)
            if pages is not None:
                pages.cancel()
                await asyncio.wait({pages})
            pages = asyncio.create_task(all_of_them()) if on else None

    with contextlib.suppress(EOFError):
        asyncio.run(obey())


async def _page(port: int, key: str, run: str, findings: bool) -> None:
    newest, asking = 0, None

    async def ask() -> None:
        for turn in range(MOST_QUESTIONS):
            await asyncio.sleep(ASK_SECONDS * 2**turn)
            lines = [line async for line in _lines(port, key, f"/runs/{run}/findings?step={newest}")]
            if json.loads(lines[-1])["step"] >= newest:
                return

    async for line in _lines(port, key, "/events"):
        if findings and line.startswith(b"data: ") and b'"kind":"step"' in line:
            newest = json.loads(line[6:])["data"]["step"]
            if asking is None or asking.done():
                asking = asyncio.create_task(ask())


async def _lines(port: int, key: str, path: str) -> AsyncIterator[bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = f"GET /dashboard/api{path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode())
    try:
        while line := await reader.readline():
            yield line.strip()
    finally:
        writer.close()


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has taken, with that of threads that have ended, to the nanosecond.

    `/proc/PID/stat` counts in hundredths of a second, by looking which process runs at that moment.
    """
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) returns on Linux


class Turn(NamedTuple):
    """Some steps with the pages open, or closed.

    Attributes:
        cpu: processor time of the server for each step, in seconds.
        wall: time of each step, in seconds.
    """

    cpu: list[float]
    wall: list[float]


def between(turns: Sequence[Turn], field: str) -> list[tuple[float, float]]:
    """Return the mean of each turn with pages, beside the mean of the two turns without that are around it.

    Args:
        turns: without pages and with them, one after the other; without at both ends.
        field: of a turn, whose values are compared.
    """
    means = [statistics.fmean(getattr(turn, field)) for turn in turns]
    return [(means[at], (means[at - 1] + means[at + 1]) / 2) for at in range(1, len(means) - 1, 2)]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of some values, and the bounds of its 95 % interval, from samples of them."""
    drawn = random.Random(0)
    means = sorted(statistics.fmean(drawn.choices(values, k=len(values))) for _ in range(SAMPLES))
    return statistics.fmean(values), means[SAMPLES // 40], means[-SAMPLES // 40]


def say_ratio(name: str, pairs: Sequence[tuple[float, float]]) -> None:
    """Print how much larger a number is with pages than without."""
    mean, low, high = (math.expm1(value) for value in interval([math.log(on / off) for on, off in pairs]))
    on, off = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    print(
        f"  {name}: {off * 1000:.1f} ms without pages, {on * 1000:.1f} ms with {PAGES}: "
        f"{mean:+.2%} ({low:+.2%} to {high:+.2%})"
    )


def measure_server(stretches: int) -> None:
    """Print the processor time that the server takes for its pages."""
    with tempfile.TemporaryDirectory() as name, running(Path(name) / "pages") as store:
        process, port, key = serve(store.folder)
        pages, step = Pages(port, key, "pages"), 0
        turns = list[Turn]()
        for number in range(2 * stretches + 1):
            pages.turn(number % 2 == 1)
            turns.append(Turn([], []))
            for place in range(STRETCH + 1):
                before, until = cpu_seconds(process.pid), time.monotonic() + STEP_SECONDS
                step += 1
                store.step(step, until)
                if place:
                    turns[-1].cpu.append(cpu_seconds(process.pid) - before)
        pages.end()
        process.terminate()
        process.wait()
    pairs = between(turns, "cpu")
    mean, low, high = interval([on - off for on, off in pairs])
    on, off = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    print(
        f"server: {off * 1000:.1f} ms of processor time a step of {STEP_SECONDS:g} s without pages, "
        f"{on * 1000:.1f} ms with {PAGES} ({len(pairs)} turns of {STRETCH} steps): {mean * 1000 / PAGES:.2f} ms a page "
        f"and step, {mean / STEP_SECONDS:.2%} of a core for all ({low / STEP_SECONDS:.2%} to {high / STEP_SECONDS:.2%})"
    )


class Written:
    """A run in which steps are written as a job writes them."""

    def __init__(self, folder: Path, store: RunStore) -> None:
        self.folder, self._store = folder, store

    def step(self, step: int, until: float) -> None:
        """Play and train a step, so that it ends at `until`, by the monotonic clock."""
        asyncio.run(self._step(step, until))

    async def _step(self, step: int, until: float) -> None:
        started = time.monotonic()
        for group in range(EPISODES // GROUP):
            await self._store.groups.register("train", (step - 1) * (EPISODES // GROUP) + group, step, TASK, GROUP)
        for number in range(EPISODES):
            claimed = await self._store.episodes.claim("worker", f"{step} {number}", None)
            assert claimed is not None
            await self._store.episodes.end(claimed.episode_id, 1, EpisodeEnd(rewards={"agent": number % 2}))
            await asyncio.sleep(max(started + (until - started) * 0.8 * number / EPISODES - time.monotonic(), 0.0))
        await asyncio.sleep(max(until - time.monotonic(), 0.0))
        row = {"step": float(step), "train/reward_mean": 0.5, "time/step_seconds": STEP_SECONDS}
        row |= {f"train/number_{place}": float(place) for place in range(METRICS)}
        await self._store.log.put_metrics(step, row)
        await self._store.log.add_event("step", row)


TASK = Task(task_id="task", data={"question": "what is 2 + 2?"})


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Written]:
    """Make the folder of a run that counts as running while the block is open."""
    folder.mkdir()
    config = parse_config({"name": "pages", "steps": 1000, "engine": {"kind": "fake"}})
    (folder / "config.toml").write_text(dump_config(config))
    with (folder / RUN_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open_run_store(folder / "run.db", config.rollout) as store:
            asyncio.run(store.log.add_event("running", {"step": 0}))
            yield Written(folder, store)


def serve(folder: Path) -> tuple[subprocess.Popen[str], int, str]:
    """Start `palestra dashboard`, and return its process, its port and the viewer's key."""
    process, link = serve_link(folder)
    found = re.fullmatch(r"http://[^:]+:(\d+)/dashboard#(once-\w+)", link)
    assert found is not None, link
    port, code = int(found[1]), found[2]
    return process, port, viewer_key(port, code)


def serve_link(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start `palestra dashboard`, and return its process and its link."""
    command = [sys.executable, "-m", "palestra.cli.main", "dashboard", str(folder), "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def viewer_key(port: int, given: str) -> str:
    """Return the key with which a browser reads the page."""
    import httpx2

    headers = {"authorization": f"Bearer {given}"}
    return str(httpx2.post(f"http://127.0.0.1:{port}/dashboard/session", headers=headers).json()["key"])


def measure_job(model: str, steps: int) -> None:
    """Run a job that plays and trains by itself, and print what its steps take with and without pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "palestra.cli.main", "run", str(job(folder, model, steps))]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        rows, key = folder / "run" / "metrics.jsonl", folder / "run" / "api_key"
        port = 0
        while not port or not key.exists():
            time.sleep(0.1)
            assert process.poll() is None, (folder / "log").read_text()
            found = re.search(r"http://[\w.]+:(\d+)", (folder / "log").read_text())
            port = 0 if found is None else int(found[1])
        pages = Pages(port, viewer_key(port, key.read_text().strip()), "pages")
        spent = _watch_steps(process, rows, pages)
        pages.end()
        assert process.wait() == 0, (folder / "log").read_text()
        read = {int(row["step"]): row["time/step_seconds"] for row in map(json.loads, rows.read_text().splitlines())}
    turns = list[Turn]()
    for first in range(STRETCH + 1, steps - STRETCH + 1, STRETCH):  # the first turn is not used: everything is new then
        counted = range(first + 1, first + STRETCH)
        turns.append(Turn([spent[step] for step in counted], [read[step] for step in counted]))
    turns = turns[: (len(turns) - 1) // 2 * 2 + 1]
    print(f"{model}: {len(turns) // 2} turns of {STRETCH - 1} steps with pages, between as many without and one more")
    say_ratio("time of a step", between(turns, "wall"))
    say_ratio("processor time of a step", between(turns, "cpu"))


def _watch_steps(process: subprocess.Popen[bytes], rows: Path, pages: Pages) -> dict[int, float]:
    """Open and close the pages in turns until a job has ended; return the processor time of each step, in seconds."""
    spent, done, before = dict[int, float](), 0, 0.0
    while process.poll() is None:
        finished = rows.read_bytes().count(b"\n") if rows.exists() else 0
        if finished > done:
            with contextlib.suppress(OSError):  # it ends
                now = cpu_seconds(process.pid)
                spent |= {step: (now - before) / (finished - done) for step in range(done + 1, finished + 1)}
                before = now
            if finished // STRETCH > done // STRETCH:
                pages.turn((finished // STRETCH) % 2 == 0)
            done = finished
        time.sleep(0.01)
    return spent


def job(folder: Path, model: str, steps: int) -> Path:
    """Write the configuration of the job, and return its file."""
    config = {
        "name": "pages",
        "run_dir": str(folder / "run"),
        "steps": steps,
        "engine": {"threads": 1},
        "policies": {"policy": {"model": model, "sampling": {"max_tokens": 24}, "max_context": 512}},
        "environment": {"name": "arithmetic", "train_tasks": 64, "validation_tasks": 0},
        "rollout": {"group_size": GROUP, "groups_per_step": EPISODES // GROUP},
        "evaluation": {"every_steps": 0},
        "server": {"port": 0},
    }
    path = folder / "job.toml"
    path.write_text(dump_config(parse_config(config)))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="of a real job; without it, the server alone")
    parser.add_argument("--steps", type=int, default=40, help="of the job")
    parser.add_argument("--stretches", type=int, default=3, help="turns with pages")
    arguments = parser.parse_args()
    if arguments.model is None:
        measure_server(arguments.stretches)
    else:
        measure_job(arguments.model, arguments.steps)
