"""How much memory the models of a job take, by hand."""

from __future__ import annotations

import pytest

from palestra.config import parse_config
from palestra.runtime.model_room import room_of
from palestra.runtime.model_sizes import Sizes, add_policy

N = 1000  # parameters
FROZEN = {"policies": {"policy": {}, "judge": {"frozen": True}}, "roles": {"judge": "judge"}}
ADAPTER = {"policies": {"policy": {"adapter": {"rank": 4}}}}
STARTED = {"kind": "vllm", "python": "/opt/vllm/bin/python"}
RUNNING = {"kind": "vllm", "url": "http://a:8000"}
SEVERAL = ["http://a:30000", "http://b:30000", "http://c:30000"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 2 + 16),
        ({"engine": {"replicas": 3}}, 3 * 2 + 2 + 16),  # and the copy that a worker reads when it is started again
        ({"engine": {"replicas": 3, "dtype": "float32"}}, 3 * 4 + 4 + 16),
        (FROZEN, 2 + 16 + 2),
        (FROZEN | {"engine": {"replicas": 2}}, 2 * 2 + 2 + 16 + 2 * 2),
        (ADAPTER, 2),  # engine and trainer share the base
        (ADAPTER | {"engine": {"replicas": 2}}, 2 * 2 + 2),
        ({"trainer": {"devices": 2}}, 2 + 16),
        (ADAPTER | {"trainer": {"devices": 4}}, 2 + 2),  # the ranks share out a base of their own
        (ADAPTER | {"trainer": {"devices": 4}, "engine": {"replicas": 2}}, 2 * 2 + 2),
        ({"engine": STARTED}, 2 + 2 + 16),
        (ADAPTER | {"engine": STARTED}, 2 + 2),  # a server has a base of its own
        ({"engine": RUNNING}, 2 + 16),
        (ADAPTER | {"engine": RUNNING}, 2),
        ({"engine": {"workers": [{"replicas": 2}, RUNNING]}}, 2 * 2 + 2 + 16),
        ({"engine": {"kind": "sglang", "url": SEVERAL}}, 2 + 16),  # the copy that the job keeps for its workers
        (ADAPTER | {"engine": {"kind": "sglang", "url": SEVERAL}, "trainer": {"devices": 2}}, 2),
    ],
)
def test_every_inference_worker_of_this_machine_has_a_copy(config, expected):
    job, sizes = parse_config(config), Sizes()
    for name in job.policies:
        add_policy(sizes, job, name, f"model of {name}", N)
    assert room_of(job, sizes).machine == expected * N
