"""Counts of episodes: those that were kept and those that are read add up to all."""

from __future__ import annotations

import random
import sqlite3

from palestra.store.browsing import browse
from palestra.store.counting import EpisodeCounts
from palestra.store.lifecycle import EpisodeEnd
from unit.building import TASK, open_store

COUNT = "SELECT kind, state, count(*) FROM episodes GROUP BY kind, state"


async def test_they_are_those_of_the_table_whatever_happened_between(tmp_path):
    counts, rng = EpisodeCounts(), random.Random(3)
    with open_store(tmp_path) as store:
        held = []
        for step in range(1, 30):
            await store.groups.register("train", step, step, TASK, 3)
            if step % 5 == 0:
                await store.groups.register("validation", step, step, TASK, 1)
            while (claimed := await store.episodes.claim("w", f"{step}-{rng.random()}", None)) is not None:
                held.append(claimed)
            rng.shuffle(held)
            for one in [held.pop() for _ in range(len(held) * 3 // 4)]:
                if rng.random() < 0.3:
                    await store.episodes.abort(one.episode_id, one.fence, "agent_failed: x", rng.random() < 0.5)
                else:
                    await store.episodes.end(one.episode_id, one.fence, EpisodeEnd(rewards={"agent": 1.0}))
            if step > 2:
                await store.log.put_metrics(step - 2, {"step": float(step - 2)})
            if step == 20:
                await store.groups.register_again("train", 19, {19: ["train-000019-00"]})
                await store.episodes.register_adhoc(TASK, "a")
            with browse(tmp_path / "run.db") as connection, sqlite3.connect(tmp_path / "run.db") as plain:
                wanted = {(kind, state): count for kind, state, count in plain.execute(COUNT)}
                found = counts.read(connection)
            assert {(kind, state): n for kind, own in found.items() for state, n in own.items()} == wanted
            assert sum(wanted.values()) == sum(vars_of(await store.episodes.counts()).values())


def vars_of(counts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in ("registered", "claimed", "completed", "discarded")}
