"""How much memory the models of a job take, by hand."""

from __future__ import annotations

import pytest

from palestra.config import parse_config
from palestra.runtime.model_sizes import Sizes, add_policy

N = 1000  # parameters
FROZEN = {"policies": {"policy": {}, "judge": {"frozen": True}}, "roles": {"judge": "judge"}}
ADAPTER = {"policies": {"policy": {"adapter": {"rank": 4}}}}


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
    ],
)
def test_every_inference_worker_has_a_copy(config, expected):
    job, sizes = parse_config(config), Sizes()
    for name in job.policies:
        add_policy(sizes, job, name, f"model of {name}", N)
    assert sizes.memory == expected * N
