"""The service: jobs from submission to their end through the real API, scheduler and Ray; many that run at the same
time; and what a claim costs in a run store that has much in it.

python bench/service.py jobs|ramp|claims [--count N] [--through N]        one of them alone, as one JSON line
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import sqlalchemy as sa
from figures import Part
from processes import HERE, ROOT, BenchError

from palestra import AsyncClient, ModelEndpoint
from palestra.client import Worker
from palestra.config.rollout import RolloutConfig
from palestra.store import RunStore, open_run_store
from palestra.store.tables import episodes
from palestra.types.records import Task
from palestra.types.states import EpisodeState
from palestra_control.control import ControlClient
from palestra_control.job import OVER, Job
from palestra_service.ray.cluster import stop_local

JOBS_TABLE = "Jobs from submission to their end: one step of 2 episodes, fake engine"
RAMP_TABLE = "Jobs that run at the same time, fake engine"
CLAIMS_TABLE = "One claim after another, run store on disk (synchronous=FULL), in process"
SLOTS = 2  # as many as start together, so that only the slot is waited for
STORED = (1_000, 100_000, 1_000_000)
GROUP = 1_000
OPEN = 2_000  # episodes that wait for a worker; the others stored are completed
CLAIMS = 500
JOB_GIB, KEPT_GIB = 0.13, 6.0  # what a scripted job is expected to take, and what is left to others
RAMP_LIMIT_SECONDS = 1800.0
PLAYED_AT_ONCE = 4  # of the jobs that run: more workers than that would keep two cores from the rest
WORKERS_NICE = 15  # this process plays them; elsewhere that is laptops, here it must not keep a core from the service
ENGINE = {"kind": "fake", "reply_tokens": 3}
SHORT = {
    "steps": 1,
    "engine": ENGINE,
    "environment": {"name": "frozen-lake", "settings": {"impossible_reward": -1.0}, "train_tasks": 1},
    "rollout": {"group_size": 2, "groups_per_step": 1},
    "evaluation": {"every_steps": 0},
}
HELD = {key: value for key, value in SHORT.items() if key != "environment"}  # runs until somebody has given it a task


def run(part: Part, quick: bool) -> None:
    """Each with a service of its own."""
    add_claims(part, STORED[:2] if quick else STORED)
    add_jobs(part, 40 if quick else 1_000, 40 if quick else 200)
    add_ramp(part, 6 if quick else 100)


# Jobs


@contextmanager
def service(slots: int) -> Iterator[ControlClient]:
    """`palestra serve` with a local Ray cluster and a durable store; both are ended, whatever still runs on them."""
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / "runs"))
    log, process = folder / "serve.log", None
    words = ["serve", "--state-dir", folder / "state", "--port", 0, "--cpus", slots, "--gpus", 0, "--insecure-no-auth"]
    try:
        with log.open("wb") as out:
            command = [str(word) for word in (Path(sys.executable).with_name("palestra"), *words)]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        url = _until(lambda: re.search(r"control plane at (http://\S+),", log.read_text()), 90, process, log)[1]
        with ControlClient(url) as control:
            yield control
    finally:
        if process is not None:
            process.kill()
            process.wait()
        stop_local(folder / "state")
        shutil.rmtree(folder, ignore_errors=True)


def jobs_through(count: int, through: int) -> dict[str, Any]:
    """Submit them one after another while nothing starts; then let the first `through` of them run, two at a time."""
    with service(SLOTS) as control:
        control.request("POST", "/cluster/drain", json={"on": True})
        submits: list[float] = []
        jobs: list[Job] = []
        for _ in range(count):
            begin = time.perf_counter()
            jobs.append(control.submit(SHORT))
            submits.append(time.perf_counter() - begin)
        lists = [_seconds(lambda: control.request("GET", "/jobs")) for _ in range(50)]
        control.request("POST", "/cluster/drain", json={"on": False})
        begin = time.perf_counter()
        for job in jobs[:through]:
            while (view := job.view()).state not in OVER:
                time.sleep(0.2)
            if view.state != "completed":
                raise BenchError(f"{view.job_id} is {view.state}: {view.reason}")
        seconds = time.perf_counter() - begin
        gaps, starts = freed_to_next(jobs[:through])
    return {"submits": submits, "lists": lists, "gaps": gaps, "starts": starts, "seconds": seconds}


def freed_to_next(jobs: list[Job]) -> tuple[list[float], list[float]]:
    """Seconds from each end to the start that it made room for; and from each start until the server listens."""
    at: dict[str, list[float]] = {"starting": [], "running": [], "completed": []}
    took = []
    for job in jobs:
        mine = {change.following: change.at for change in job.changes()}
        for state, times in at.items():
            times.append(mine[state])
        took.append(mine["running"] - mine["starting"])
    starts, ends = sorted(at["starting"]), sorted(at["completed"])
    return [start - end for end, start in zip(ends, starts[SLOTS:], strict=False)], took


def add_jobs(part: Part, count: int, through: int) -> None:
    """A row."""
    found = jobs_through(count, through)
    part.add(
        JOBS_TABLE,
        f"{count:,} submitted, {through:,} run, {SLOTS} slots",
        f"python bench/service.py jobs --count {count} --through {through}",
        submit__p50__ms=[_ms(found["submits"], 50)],
        submit__p99__ms=[_ms(found["submits"], 99)],
        list__p99__ms=[_ms(found["lists"], 99)],
        jobs_per_s=[through / found["seconds"]],
        start__p50__s=[_ms(found["starts"], 50) / 1e3],
        freed__slot__to__next__start__p50__ms=[_ms(found["gaps"], 50)],
        p99__ms=[_ms(found["gaps"], 99)],
    )


# Many at the same time


def most_jobs(wanted: int) -> int:
    """As many as there is memory for now."""
    free = psutil.virtual_memory().available / 2**30 - KEPT_GIB
    return max(min(wanted, int(free / JOB_GIB)), 1)


def ramp(count: int) -> dict[str, Any]:
    """Submit jobs that wait for a task, until all run; then play all to their end. The list is asked for all along."""
    with service(count) as control:
        asking = subprocess.Popen(
            (sys.executable, HERE / "service_lists.py", control.url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            free = psutil.virtual_memory().available
            begin = time.perf_counter()
            jobs = [control.submit(HELD) for _ in range(count)]
            _wait_for(control, "running", count)
            ramped, all_run_at = time.perf_counter() - begin, time.time()
            gib = (free - psutil.virtual_memory().available) / 2**30 / count
            time.sleep(5.0)
            os.nice(WORKERS_NICE)
            begin = time.perf_counter()
            servers = [job.wait_for_server() for job in jobs]
            asyncio.run(_play_all([(server.url, server.api_key) for server in servers]))
            _wait_for(control, "completed", count)
            played = time.perf_counter() - begin
        finally:
            asked: list[tuple[float, float]] = json.loads(asking.communicate()[0])
        starts = sum(view.starts for view in control.jobs())
    if starts != count:
        raise BenchError(f"{count} jobs were started {starts} times")
    starting = [seconds for at, seconds in asked if at < all_run_at]
    played_at = [seconds for at, seconds in asked if at >= all_run_at]
    return {"starting": starting, "playing": played_at, "ramp_seconds": ramped, "play_seconds": played, "gib": gib}


async def _play_all(jobs: list[tuple[str, str]]) -> None:
    """A task for each job, and a worker that plays it until the job is over; a few of them at a time."""
    at_once = asyncio.Semaphore(PLAYED_AT_ONCE)
    async with openai.AsyncOpenAI(base_url="http://set-in-each-call", api_key="likewise") as shared:

        async def rollout(task: Mapping[str, Any], policy: ModelEndpoint) -> float:
            """One call; what was said last is the reward, so that answers differ."""
            model = shared.with_options(base_url=policy.base_url, api_key=policy.api_key)
            reply = await model.chat.completions.create(
                model=policy.model, messages=[{"role": "user", "content": task["text"]}]
            )
            return float((reply.choices[0].message.content or "0")[-1])

        async def play(url: str, key: str) -> None:
            async with at_once, AsyncClient(url, key, worker_id="bench") as client:
                await client.push_tasks([{"text": "go"}], [])
                await Worker(client, rollout, 2).run()

        await asyncio.gather(*(play(url, key) for url, key in jobs))


def _wait_for(control: ControlClient, state: str, count: int) -> None:
    until = time.monotonic() + RAMP_LIMIT_SECONDS
    while True:
        states = [view.state for view in control.jobs()]
        if states.count(state) == count:
            return
        if "failed" in states or time.monotonic() > until:
            raise BenchError(f"jobs are {sorted(states)}; {state} was expected of all")
        time.sleep(0.5)


def add_ramp(part: Part, wanted: int) -> None:
    """A row, with as many jobs as fit."""
    count = most_jobs(wanted)
    if count < wanted:
        part.notes.append(f"{RAMP_TABLE}: {count} in place of {wanted}, for that is what there was memory for")
    found = ramp(count)
    part.add(
        RAMP_TABLE,
        f"{count} jobs",
        f"python bench/service.py ramp --count {count}",
        until__all__run__s=[found["ramp_seconds"]],
        list__p50__ms=[_ms(found["starting"] + found["playing"], 50)],
        list__p99__while__they__start__ms=[_ms(found["starting"], 99)],
        list__p99__while__they__are__played__ms=[_ms(found["playing"], 99)],
        list__max__ms=[_ms(found["starting"] + found["playing"], 100)],
        GiB_per_job=[found["gib"]],
        from__the__first__task__until__all__are__completed__s=[found["play_seconds"]],
    )


# Claims


def claims_among(stored: int) -> dict[str, Any]:
    """Claim in a store with so many episodes: wall seconds of each claim, and the process's CPU seconds."""
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / "runs"))
    try:
        with open_run_store(folder / "run.db", RolloutConfig()) as store:
            return asyncio.run(_claims(store, stored))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _claims(store: RunStore, stored: int) -> dict[str, Any]:
    size = min(GROUP, stored)
    for number in range(stored // size):
        task = Task(task_id=f"t{number}", data={"question": f"What is {number} + {number}?"})
        await store.groups.register("train", number, number // 8 + 1, task, size)
    last_groups = stored // size - min(OPEN, stored) // size
    over = sa.update(episodes).where(episodes.c.group_index < last_groups).values(state=EpisodeState.COMPLETED.value)
    await store.db.write(lambda c: c.execute(over).rowcount)
    for number in range(50):  # warm
        await store.episodes.claim("worker", f"warm-{number}", None)
    seconds = []
    cpu = time.process_time()
    for number in range(CLAIMS):
        begin = time.perf_counter()
        claimed = await store.episodes.claim("worker", f"claim-{number}", None)
        seconds.append(time.perf_counter() - begin)
        if claimed is None:
            raise BenchError("there was nothing left to claim")
    return {"seconds": seconds, "cpu": (time.process_time() - cpu) / CLAIMS}


def add_claims(part: Part, sizes: tuple[int, ...]) -> None:
    """A row for each size."""
    for stored in sizes:
        found = claims_among(stored)
        part.add(
            CLAIMS_TABLE,
            f"{stored:,} episodes stored",
            f"python bench/service.py claims --count {stored}",
            CPU__ms_per_claim=[1e3 * found["cpu"]],
            p50__ms=[_ms(found["seconds"], 50)],
            p99__ms=[_ms(found["seconds"], 99)],
        )


def _until(condition: Callable[[], Any], seconds: float, process: subprocess.Popen[bytes], log: Path) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"palestra serve did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return found


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _ms(seconds: list[float], percent: float) -> float:
    return 1e3 * float(np.percentile(seconds, percent, method="higher"))


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("jobs", "ramp", "claims"))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--through", type=int, help="of the jobs: so many are run to their end (default: all)")
    arguments = parser.parse_args()
    part = Part(name="service")
    {
        "jobs": lambda part, count: add_jobs(part, count, arguments.through or count),
        "ramp": add_ramp,
        "claims": lambda part, count: add_claims(part, (count,)),
    }[arguments.what](part, arguments.count)
    for note in part.notes:
        print(note, file=sys.stderr)
    print(json.dumps({figure.column: round(figure.median, 4) for figure in part.figures}))


if __name__ == "__main__":
    main()
