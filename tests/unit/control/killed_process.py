"""Submits and moves jobs until it is killed, and says each thing that it was told is done."""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise

from palestra.types.states import JobState
from palestra_service.store.control_store import ControlStore
from unit.control.building import REQUEST

WAY = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.COMPLETED)


async def one(store: ControlStore, number: int) -> None:
    for turn in range(10_000):
        key = f"{sys.argv[2]}-{number}-{turn}"
        job = await store.submit_job("a", "ann", REQUEST, key)
        print(key, job.job_id, "queued", flush=True)
        for before, after in pairwise(WAY):
            await store.change_state(job.job_id, before, after, key)
            print(key, job.job_id, after.value, flush=True)


async def main() -> None:
    with ControlStore(sys.argv[1]) as store:
        await asyncio.gather(*(one(store, number) for number in range(8)))


asyncio.run(main())
