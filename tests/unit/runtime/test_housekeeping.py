"""What is done again and again while a job is open goes on after a failure."""

from __future__ import annotations

import asyncio
import errno

from palestra.runtime import local_job as housekeeping
from palestra.runtime.local_job import looked_after
from palestra.types.progress import JobProgress
from unit.building import open_store


async def test_pictures_are_looked_for_again_after_a_disk_was_gone_for_a_while(tmp_path, monkeypatch, caplog):
    looks, again = 0, asyncio.Event()

    async def remove(*_: object) -> int:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        again.set()
        return 0

    monkeypatch.setattr(housekeeping, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(housekeeping, "remove_unnamed_pictures", remove)
    with open_store(tmp_path) as store:
        async with looked_after(store, JobProgress(job="run", steps=1, run_dir="run"), None, 1.0):
            await asyncio.wait_for(again.wait(), 10)
    assert "pictures that nothing needs can't be removed now: [Errno 116] Stale file handle" in caplog.text
