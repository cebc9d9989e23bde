"""What a running job will take, by its first two steps."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from sqlalchemy import func, select

from palestra.config import JobConfig
from palestra.errors import PalestraError
from palestra.runtime.local_job import LocalJob
from palestra.store.browsing import browse
from palestra.store.run_log import readable_metrics
from palestra.store.spending import usage_of_calls
from palestra.store.tables import episodes, groups, tasks
from palestra.threads import in_thread
from palestra_inspect.estimate import JobEstimate, estimate_of
from palestra_inspect.trial import STEPS, Trial
from palestra_service.estimates import amounts_in_words

log = logging.getLogger("palestra")
LOOK_SECONDS = 0.2  # between two looks at the steps of a job


async def say_estimate(job: LocalJob) -> None:
    """Add an event with the estimate of a job when its second step is over, unless an earlier process has."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if job.progress.step >= STEPS or job.progress.over:
            break
    run = Path(job.progress.run_dir)
    try:
        found = await in_thread(lambda: _estimate_of_run(run, job.opened.config))
        if found is not None and not job.progress.over:
            text = (
                f"by its first {STEPS} steps, the job takes {amounts_in_words(found.tokens, found.hours, found.money)}"
            )
            await job.opened.store.log.add_event("estimate", {"step": STEPS, "text": text})
    except PalestraError as error:
        log.warning("the estimate of the job could not be made: %s", error)


def _estimate_of_run(run: Path, config: JobConfig) -> JobEstimate | None:
    """Return the estimate by the first steps of a run; None: they are not over, or an event has it. Blocks."""
    with browse(run / "run.db") as connection:
        rows = [row for row in readable_metrics(connection, after=0).rows if row["step"] <= STEPS]
        known = connection.exec_driver_sql("SELECT 1 FROM events WHERE kind = 'estimate'").first()
        if len(rows) < STEPS or known is not None:
            return None
        of_steps = select(episodes.c.episode_id).join(
            groups, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index)
        )
        played = set(connection.execute(of_steps.where(groups.c.kind == "train", groups.c.step <= STEPS)).scalars())
        used = [one for one in usage_of_calls(connection, config) if one.episode_id in played]
        held_out = select(func.count()).select_from(tasks).where(tasks.c.split.startswith("validation"))
        return estimate_of(
            config,
            Trial(
                rows=rows,
                used=used,
                episodes=len(played),
                seconds=rows[-1].get("wall_seconds", 0.0),
                held_out=connection.execute(held_out).scalar_one(),
            ),
        )
