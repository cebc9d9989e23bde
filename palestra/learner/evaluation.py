"""Validation: the same claim path, greedy, on the version that stands while nothing is trained."""

from __future__ import annotations

import time
from collections.abc import Sequence

from palestra.ledger import Groups
from palestra.schemas.records import Task
from palestra.schemas.states import EpisodeState


async def evaluate(groups: Groups, tasks: Sequence[Task], done: int) -> dict[str, float]:
    """Score every validation task once, and return the metrics of it.

    Args:
        groups: of the job; each task is a group of one episode.
        tasks: the validation tasks.
        done: how many steps are done.

    Discarded episodes are not scored, and not counted as 0: the mean says how many it is of. Episodes that were
    scored before a restart are not played again.
    """
    started = time.monotonic()
    known = await groups.of_step("validation", done)
    first = known[0][0].group_index if known else await groups.next_index("validation")
    for offset, task in enumerate(tasks):  # those that a restart finds registered are left as they are
        await groups.register("validation", first + offset, done, task, 1)
    while True:
        await groups.wait_settled("validation", done, await groups.discarded("validation"))
        scored = await groups.of_step("validation", done)
        episodes = [episode for _, members in scored for episode in members]
        if all(e.state in (EpisodeState.COMPLETED, EpisodeState.DISCARDED) for e in episodes):
            break
    rewards = [e.reward for e in episodes if e.reward is not None]
    row = {
        "validation/scored": float(len(rewards)),
        "validation/total": float(len(episodes)),
        "time/validation_seconds": time.monotonic() - started,
    }
    return row | ({"validation/reward_mean": sum(rewards) / len(rewards)} if rewards else {})
