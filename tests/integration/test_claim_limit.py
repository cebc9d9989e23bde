"""A job with `rollout.max_claimed`, as its workers meet it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import Job, Plane, until

SETTINGS = {
    "steps": 100,
    "engine": {"kind": "fake"},
    "rollout": {"max_claimed": 2},
    "evaluation": {"every_steps": 0},
}


def claim(url: str, name: str, wait_seconds: float) -> dict:
    with Plane(url) as plane:
        body = {"request_id": name, "worker_id": name, "wait_seconds": wait_seconds}
        return plane.post("/claim_episode", body).json()


@pytest.mark.slow
def test_a_worker_that_waits_at_the_limit_gets_the_episode_that_the_end_of_another_makes_room_for(tmp_path):
    with Job(tmp_path, SETTINGS) as job, ThreadPoolExecutor(2) as threads:
        job.start()
        with Plane(job.url) as plane:
            first, second = plane.claim(), plane.claim()
            assert claim(job.url, "third", 0.0)["status"] == "waiting"
            waiting = [threads.submit(claim, job.url, f"waiting-{n}", 50.0) for n in range(2)]
            until(lambda: plane.status()["workers"] == 3, "both wait, beside the one that plays")
            assert plane.end(first).status_code == 200
            assert plane.end(second).status_code == 200
            found = [wait.result()["episode"]["episode_id"] for wait in waiting]
            assert len({*found, first["episode_id"], second["episode_id"]}) == 4
            assert claim(job.url, "fifth", 0.0)["status"] == "waiting"
