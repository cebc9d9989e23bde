"""What ten open pages cost a job: processor time of the server, and the time of a step of a job that serves itself.

    python bench/open_pages.py                       # processor time, of a run in which steps are written
    python bench/open_pages.py --model tiny-random   # time of a step of a real job

The pages are a process of their own, of low priority, because the people who look have machines of their own. Each
holds a stream of events, as every view of the page does; two have the findings open, and ask for them after each step
until they are of that step. Nothing else is asked while a page stays open.

Processor time is that of a server of nothing but the page, beside a process that writes steps as a job does: 64
episodes, a row of 45 metrics and an event every `STEP_SECONDS`. Stretches with and without pages alternate in both
measurements, so that what else the machine does falls on both alike. Steps of a job that take less than a second, as
those of the fake engine, are too short for this: a stretch is over before the process of the pages has begun.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil

from palestra.config import dump_config, parse_config
from palestra.disk import RUN_LOCK
from palestra.store import RunStore, open_run_store
from palestra.types.records import Task

PAGES, WITH_FINDINGS, STRETCH = 10, 2, 4
STEP_SECONDS = 4.0  # about what a step of SmolLM2-135M takes on two cores
EPISODES, GROUP, METRICS = 64, 8, 45
ASK_SECONDS, MOST_QUESTIONS = 1.0, 6  # see findings.js


class Pages:
    """Ten pages that are open while the block is, in a process of their own."""

    def __init__(self, port: int, key: str, run: str) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=_look, args=(port, key, run), daemon=True)

    def __enter__(self) -> Pages:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _look(port: int, key: str, run: str) -> None:
    os.nice(19)

    async def all_of_them() -> None:
        await asyncio.gather(*(_page(port, key, run, number < WITH_FINDINGS) for number in range(PAGES)))

    with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the job is over
        asyncio.run(all_of_them())


async def _page(port: int, key: str, run: str, findings: bool) -> None:
    newest, asking = 0, None

    async def ask() -> None:
        for turn in range(MOST_QUESTIONS):
            await asyncio.sleep(ASK_SECONDS * 2**turn)
            lines = [line async for line in _lines(port, key, f"/runs/{run}/findings")]
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


def measure_server(stretches: int) -> None:
    """Print the processor time that the server takes for its pages."""
    with tempfile.TemporaryDirectory() as name, running(Path(name) / "pages") as store:
        process, port, key = serve(store.folder)
        server, per_step = psutil.Process(process.pid), dict[bool, list[float]]({False: [], True: []})
        step = 0
        for stretch in range(2 * stretches):
            watched = stretch % 2 == 1
            with Pages(port, key, "pages") if watched else contextlib.nullcontext():
                for turn in range(STRETCH + 1):
                    before, until = sum(server.cpu_times()[:2]), time.monotonic() + STEP_SECONDS
                    step += 1
                    store.step(step, until)
                    if turn:  # not the step in which the pages were opened
                        per_step[watched].append(sum(server.cpu_times()[:2]) - before)
        process.terminate()
        process.wait()
    # The kernel counts in hundredths of a second, so that means say more than medians.
    alone, watched_ = (statistics.fmean(per_step[key]) for key in (False, True))
    more = watched_ - alone
    print(
        f"server: {alone * 1000:.1f} ms of processor time a step of {STEP_SECONDS:g} s without pages "
        f"({len(per_step[False])} steps), {watched_ * 1000:.1f} ms with {PAGES} ({len(per_step[True])} steps): "
        f"{more * 1000 / PAGES:.2f} ms a page and step, {more / STEP_SECONDS:.2%} of a core for all"
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
            await self._store.episodes.end(claimed.episode_id, 1, {"agent": number % 2}, None, {})
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
        with open_run_store(folder / "run.db", config.rollout, config.store) as store:
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
    """Run a job that plays and trains by itself, and print the medians of its steps with and without pages."""
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
        with_pages = set[int]()
        with contextlib.ExitStack() as stack:
            pages = None
            while process.poll() is None:
                done = len(rows.read_text().splitlines()) if rows.exists() else 0
                wanted = (done // STRETCH) % 2 == 1
                if wanted and pages is None:
                    pages = stack.enter_context(Pages(port, viewer_key(port, key.read_text().strip()), "pages"))
                elif not wanted and pages is not None:
                    stack.close()
                    pages = None
                if pages is not None:
                    with_pages.add(done + 1)
                time.sleep(0.05)
        assert process.returncode == 0, (folder / "log").read_text()
        read = [json.loads(line) for line in rows.read_text().splitlines()]
    taken = {int(row["step"]): row["time/step_seconds"] for row in read if row["step"] > STRETCH}
    edges = {step for step in taken if (step in with_pages) != (step - 1 in with_pages)}  # pages opened in its middle
    on = [seconds for step, seconds in taken.items() if step in with_pages and step not in edges]
    off = [seconds for step, seconds in taken.items() if step not in with_pages and step not in edges]
    before, during = statistics.median(off), statistics.median(on)
    print(
        f"{model}: a step takes {before * 1000:.1f} ms without pages ({len(off)} steps, {_spread(off)}), "
        f"{during * 1000:.1f} ms with {PAGES} ({len(on)} steps, {_spread(on)}): {during / before - 1:+.1%}"
    )


def _spread(values: list[float]) -> str:
    quarters = statistics.quantiles(values, n=4)
    return f"quartiles {quarters[0] * 1000:.0f} and {quarters[2] * 1000:.0f}"


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
    parser.add_argument("--stretches", type=int, default=3, help="of steps with pages, and as many without")
    arguments = parser.parse_args()
    if arguments.model is None:
        measure_server(arguments.stretches)
    else:
        measure_job(arguments.model, arguments.steps)
