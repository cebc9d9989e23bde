"""Validation during training: episodes are claimed in the same way and sampled greedily, while no step is trained."""

from __future__ import annotations

import time
from collections.abc import Sequence

from palestra.config import Roles
from palestra.store import Groups
from palestra.types.records import Task
from palestra.types.states import EpisodeState


async def evaluate(groups: Groups, tasks: Sequence[Task], done: int, roles: Roles) -> dict[str, float]:
    """Score every validation task once, and return the metrics.

    Discarded episodes are not scored and do not count as 0: the metrics say how many tasks the mean is of. Episodes
    that were scored before a restart are not played again.

    Args:
        groups: the job's groups; each task becomes a group of one episode.
        tasks: the validation tasks.
        done: number of steps that are done.
        roles: which agents a frozen policy plays; their rewards are not counted.
    """
    started = time.monotonic()
    known = await groups.of_step("validation", done)
    first = known[0][0].group_index if known else await groups.next_index("validation")
    for offset, task in enumerate(tasks):  # after a restart, registering an existing group changes nothing
        await groups.register("validation", first + offset, done, task, 1)
    while True:
        await groups.wait_settled("validation", done, await groups.discarded("validation"))
        scored = await groups.of_step("validation", done)
        episodes = [episode for _, members in scored for episode in members]
        if all(e.state in (EpisodeState.COMPLETED, EpisodeState.DISCARDED) for e in episodes):
            break
    rewards = [float(sum(roles.trained_rewards(e.rewards).values())) for e in episodes if e.rewards is not None]
    row = {
        "validation/scored": float(len(rewards)),
        "validation/total": float(len(episodes)),
        "time/validation_seconds": time.monotonic() - started,
    }
    return row | ({"validation/reward_mean": sum(rewards) / len(rewards)} if rewards else {})
