"""What the watchdog calls stuck, of each moment in which nothing happens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from palestra.config import WatchdogConfig
from palestra.engine.base import EngineLoad, WorkerLoad
from palestra.runtime.watchdog import JobActivity, Watchdog, stuck_part
from palestra.types.clock import SystemClock
from palestra.types.progress import Counts, Part


def worker(number, state):
    return WorkerLoad(
        name=f"inference worker {number}", state=state, requests=1, process=1, restarts=0, versions={"policy": "0.1"}
    )


def moment(
    part=Part.LEARNER, collects=True, registered=4, claimed=0, unjudged=0, workers=0, plays_itself=False, **others
):
    counts = Counts(registered=registered, claimed=claimed, unjudged=unjudged, completed=0, discarded=0)
    return JobActivity(
        part=part,
        phase="gathering step 3",
        collects=collects,
        episodes=counts,
        workers=workers,
        plays_itself=plays_itself,
        **others,
    )


BUSY = EngineLoad(waiting=2, running=1)
POOL = EngineLoad(waiting=2, running=1, workers=(worker(0, "updating"), worker(1, "ready")))


@pytest.mark.parametrize(
    ("now", "stuck"),
    [
        (moment(Part.WEIGHT_SYNC), "weight sync: the engine has not taken the new weights"),
        (moment(Part.WEIGHT_SYNC, engines=[POOL]), "new weights (inference worker 0 is updating)"),
        (moment(Part.TRAINER), "trainer: gathering step 3 does not end"),
        (moment(Part.CHECKPOINT), "checkpoint: "),
        (moment(collects=False), "learner: gathering step 3 does not end"),
        (moment(engines=[BUSY], claimed=2), "engine: 3 calls have got no token"),
        (moment(engines=[POOL], claimed=2), "no token (inference worker 1 is ready)"),
        (moment(claimed=2, workers=1), "collectors: 2 episodes are being played, and none calls"),
        (moment(claimed=2, holders=["a", "b"]), "collectors: 2 episodes are being played (held by a, b)"),
        (moment(unjudged=3), "judge: 3 episodes wait for its verdict"),
        (moment(registered=0), "learner: gathering step 3 waits for episodes, and none is open"),
        (moment(plays_itself=True), "collectors: the job's own runners claim none of 4"),
        (moment(workers=3), "collectors: 3 workers are connected, and hold none of 4"),
    ],
)
def test_the_part_that_holds_up_the_others_is_named(now, stuck):
    found = stuck_part(now)
    assert found is not None
    assert stuck in found


@pytest.mark.parametrize("now", [moment(), moment(Part.TASKS)], ids=["no worker", "no tasks"])
def test_that_nobody_plays_is_no_fault_of_the_job(now):
    assert stuck_part(now) is None


async def test_a_job_whose_judge_gives_verdicts_is_not_stuck():
    verdicts = SimpleNamespace(recorded=0)
    plane = SimpleNamespace(
        sessions=SimpleNamespace(context=SimpleNamespace(counts={"completion_tokens": 5})),
        progress=SimpleNamespace(step=1),
        store=SimpleNamespace(verdicts=verdicts, audits=SimpleNamespace(recorded=0)),
    )
    watching = asyncio.create_task(Watchdog(WatchdogConfig(stuck_seconds=0.4), plane, False, SystemClock()).run())
    for _ in range(10):
        await asyncio.sleep(0.1)
        verdicts.recorded += 1
    assert not watching.done()
    watching.cancel()
