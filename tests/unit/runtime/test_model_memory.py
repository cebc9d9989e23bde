"""How much memory the models of a job take, by hand."""

from __future__ import annotations

import pytest

from palestra.config import parse_config
from palestra.errors import ConfigError
from palestra.runtime import model_memory
from palestra.runtime.model_memory import RANK_BYTES, ModelFacts, check_memory, machine_bytes, memory_of
from palestra.runtime.terms import JobPlaces

N = 10**6  # parameters
FROZEN = {"policies": {"policy": {}, "judge": {"frozen": True}}, "roles": {"judge": "judge"}}
ADAPTER = {"policies": {"policy": {"adapter": {"rank": 4}}}}
STARTED = {"kind": "vllm", "python": "/opt/vllm/bin/python"}
RUNNING = {"kind": "vllm", "url": "http://a:8000"}
SEVERAL = ["http://a:30000", "http://b:30000", "http://c:30000"]


@pytest.mark.parametrize(
    ("config", "expected", "ranks"),
    [
        ({}, 2 + 16, 0),
        ({"engine": {"replicas": 3}}, 3 * 2 + 2 + 16, 0),  # and the copy that a worker reads when it is started again
        ({"engine": {"replicas": 3, "dtype": "float32"}}, 3 * 4 + 4 + 16, 0),
        (FROZEN, 2 + 16 + 2, 0),
        (FROZEN | {"engine": {"replicas": 2}}, 2 * 2 + 2 + 16 + 2 * 2, 0),
        ({"algorithm": {"name": "ppo"}}, 2 + 2 * 16, 0),
        ({"algorithm": {"name": "reward_model"}}, 2 + 4 + 16, 0),  # of the policy, which is not trained, weights alone
        (ADAPTER, 2, 0),  # engine and trainer share the base
        (ADAPTER | {"engine": {"replicas": 2}}, 2 * 2 + 2, 0),
        ({"trainer": {"devices": 2}}, 2 + 16, 2),
        (ADAPTER | {"trainer": {"devices": 4}}, 2 + 2, 4),  # the ranks share out a base of their own
        ({"engine": STARTED}, 2 + 2 + 16, 0),
        (ADAPTER | {"engine": STARTED}, 2 + 2, 0),  # a server has a base of its own
        ({"engine": RUNNING}, 2 + 16, 0),
        (ADAPTER | {"engine": RUNNING}, 2, 0),
        ({"engine": {"workers": [{"replicas": 2}, RUNNING]}}, 2 * 2 + 2 + 16, 0),
        ({"engine": {"kind": "sglang", "url": SEVERAL}}, 2 + 16, 0),  # the copy that the job keeps for its workers
    ],
)
def test_every_inference_worker_of_this_machine_has_a_copy(config, expected, ranks):
    job = parse_config(config)
    models = {name: (f"model of {name}", ModelFacts(parameters=N, context=None)) for name in job.policies}
    assert machine_bytes(job, memory_of(job, models, {})) == expected * N + ranks * RANK_BYTES


def test_a_tower_that_is_not_trained_counts_as_weights_alone():
    facts = ModelFacts(parameters=10 * N, context=None, sees=True, tower=4 * N)
    for vision, each in (("frozen", 4), ("trained", 16)):
        job = parse_config({"policies": {"policy": {"model": "tiny-random-vision", "vision": vision}}})
        assert memory_of(job, {"policy": ("m", facts)}, {}).trainer == 16 * 6 * N + each * 4 * N


def test_a_rank_that_does_not_fit_into_its_bundle_is_refused(monkeypatch):
    job = parse_config({"model": "tiny-random", "trainer": {"devices": 2}})
    places = JobPlaces(trainer=lambda *_: None, rank_memory_gib=1.0)
    check_memory(job, {}, places)
    with pytest.raises(ConfigError, match=r"0\.25 GiB"):
        check_memory(job, {}, JobPlaces(trainer=lambda *_: None, rank_memory_gib=0.25))


def test_many_ranks_of_a_tiny_model_are_refused_too(monkeypatch):
    job = parse_config({"model": "tiny-random", "trainer": {"devices": 64}})
    monkeypatch.setattr(model_memory, "available_bytes", lambda swap: 24 * 2**30)
    with pytest.raises(ConfigError, match=r"25\.\d GiB"):
        check_memory(job, {}, JobPlaces())
