"""What a job holds: nothing that its configuration starts is left out of what a tenant is counted for."""

from __future__ import annotations

import json

import pytest

from palestra.config import parse_config
from palestra.errors import InvalidRequest
from palestra.http.bodies import parse_body
from palestra_control.jobs import Bundle, Resources
from palestra_control.wire import ResourcesBody, SubmitJob
from palestra_service.jobs.job_resources import body_of, resources_of
from palestra_service.placement.fitting import counted, total
from palestra_service.store.tables import resources_text
from palestra_service.store.tables import stored_resources as stored

MODEL = {"model": "tiny-random"}
VLLM = {"kind": "vllm"}  # without an interpreter, which the operator has
FOUND = {"kind": "vllm", "url": "http://a:1"}
SHARED = {"policies": {"policy": {"model": "tiny-random", "base": "shared", "adapter": {"rank": 2}}}}


def held(config: dict, adapters: int = 0, **asked) -> Resources:
    return resources_of(ResourcesBody.model_validate(asked), parse_config(config), adapters)


@pytest.mark.parametrize(
    ("config", "cpus"),
    [
        ({}, 1.0),
        ({"engine": {"replicas": 3}}, 4.0),
        ({"engine": {"replicas": 3, "threads": 2}}, 7.0),
        ({"engine": {"threads": 2}}, 1.0),
        ({"trainer": {"devices": 4, "threads": 2}}, 9.0),
        (
            {
                "trainer": {"devices": 64},
                "engine": {"replicas": 16},
                "environment": {"name": "frozen-lake", "runners": 5},
            },
            86.0,
        ),
        ({"kind": "inference", "engine": {"replicas": 2}, "trainer": {"devices": 4}}, 3.0),
        ({"engine": VLLM}, 2.0),
        ({"engine": VLLM | {"replicas": 2, "threads": 3}}, 7.0),
        ({"engine": VLLM | {"threads": 2}, "policies": {"a": {}, "b": {"frozen": True}}}, 5.0),
        ({"engine": {"kind": "vllm", "url": ["http://a:1", "http://b:2"]}}, 1.0),
        ({"engine": {"kind": "sglang", "url": "http://a:1"}}, 1.0),
        ({"engine": {"workers": [{"replicas": 2}, VLLM | {"threads": 3}, FOUND]}}, 6.0),
    ],
)
def test_workers_ranks_and_runners_hold_cores_beside_those_that_were_asked_for(config, cpus):
    own = {} if "policies" in config else MODEL
    assert total(held(own | config)) == counted(Resources(cpus=cpus))


def test_a_light_job_holds_little_because_its_base_server_has_engine_and_trainer():
    assert held(SHARED, adapters=1).cpus == 0.25
    assert held(SHARED | {"environment": {"name": "frozen-lake", "runners": 2}}, adapters=1).cpus == 2.25
    assert held(SHARED, adapters=1, cpus=3).cpus == 3


def test_a_bundle_takes_the_place_of_the_cores_of_its_role():
    config = MODEL | {"engine": {"replicas": 2}, "trainer": {"devices": 2}}
    bundle = {"role": "engine", "cpus": 4, "gpus": 1, "memory_gib": 8, "gpu_kind": "H100", "labels": {"zone": "eu"}}
    found = held(config, cpus=2, bundles=[bundle], placement="SPREAD")
    assert found.cpus == 4  # two of its own, and two ranks
    assert found.bundles == (Bundle(count=2, **bundle),)
    assert total(found) == counted(Resources(cpus=12, gpus=2, memory_gib=16))
    assert [part.cpus for part in found.parts] == [4, 4, 4]


@pytest.mark.parametrize(
    ("bundles", "said"),
    [
        ([{"role": "runner"}], "resources.bundles.0.*'runner'.*environment.runners"),
        ([{"role": "trainer"}], "trainer.devices.*2"),
        ([{"role": "engine", "count": 2}], "bundles.0.count.*2.*engine.replicas.*1"),
        ([{"role": "engine"}, {"role": "engine"}], "resources.bundles.*twice.*'engine'"),
        ([{"role": "engine", "cpus": 0}], "CPU.*GPU"),
    ],
)  # fmt: skip
def test_bundles_that_make_no_sense_are_refused_in_one_line(bundles, said):
    with pytest.raises(InvalidRequest, match=said):
        held(MODEL, bundles=bundles)


@pytest.mark.parametrize(
    ("config", "adapters", "role", "said"),
    [
        (SHARED, 1, "engine", "'engine'.*base"),
        (SHARED, 1, "trainer", "'trainer'.*base"),
        (SHARED, 1, "runner", "environment.runners"),
        (MODEL | {"kind": "inference"}, 0, "trainer", "job.*'inference'"),
        (MODEL | {"kind": "inference", "trainer": {"devices": 2}}, 0, "trainer", "job.*'inference'"),
    ],
)
def test_a_role_without_processes_is_refused_with_what_would_help(config, adapters, role, said):
    with pytest.raises(InvalidRequest, match=said):
        held(config, adapters, bundles=[{"role": role}])


@pytest.mark.parametrize(
    ("bundle", "field", "said"),
    [
        ({"role": "engine", "cpus": -1}, "cpus", "cpus: the engine bundle has '-1': Input should be greater than"),
        ({"role": "trainer", "gpus": "two"}, "gpus", "gpus: the trainer bundle has 'two': Input should be a valid"),
        ({"role": "engine", "cores": 4}, "cores", "cores: the engine bundle has '4': Extra inputs are not permitted"),
        ({"role": "engines"}, "role", "role: it is 'engines': Input should be 'engine', 'trainer' or 'runner'"),
        ({"cpus": 1}, "role", "role: Field required"),
    ],
)
def test_a_wrong_value_of_a_bundle_is_named_with_its_role(bundle, field, said):
    body = json.dumps({"config": {}, "resources": {"bundles": [{"role": "runner"}, bundle]}})
    with pytest.raises(InvalidRequest, match=f"^resources.bundles.1.{said}") as refused:
        parse_body(SubmitJob, body.encode())
    assert refused.value.field == f"resources.bundles.1.{field}"


def test_an_amount_that_no_machine_can_give_is_named_with_its_role():
    with pytest.raises(InvalidRequest, match=r"bundles.0.*'engine'.*1.00001") as refused:
        held(MODEL, bundles=[{"role": "engine", "cpus": 1.00001}])
    assert refused.value.field == "resources.bundles.0.cpus"


@pytest.mark.parametrize(
    ("config", "bundle", "said"),
    [
        ({"engine": {"replicas": 16}}, {"role": "engine", "cpus": 0.0001}, "GPU.*0.25"),
        (
            {"environment": {"name": "frozen-lake", "runners": 256}},
            {"role": "runner", "cpus": 0.001, "gpus": 0.001},
            "GPU.*0.25",
        ),
        (
            {"engine": {"threads": 256}},
            {"role": "engine", "cpus": 2},
            "bundles.0.cpus.*2.*engine.threads.*256",
        ),
        (
            {"trainer": {"devices": 2, "threads": 3}},
            {"role": "trainer", "gpus": 1},
            "1.*trainer.threads",
        ),
    ],
)
def test_processes_of_a_bundle_use_no_more_than_a_tenant_is_counted_for(config, bundle, said):
    with pytest.raises(InvalidRequest, match=said):
        held(MODEL | config, bundles=[bundle])


RANKS = {"trainer": {"devices": 2}}


@pytest.mark.parametrize(
    ("config", "bundle", "said"),
    [
        ({}, {"role": "engine", "gpus": 2}, "GPU.*gpus=1.*engine.replicas"),
        (RANKS, {"role": "trainer", "gpus": 4}, "GPU.*gpus=1.*trainer.devices"),
        (RANKS, {"role": "trainer", "gpus": 0.5}, "0.5.*GPU"),
        ({"engine": {"device": "cpu"}}, {"role": "engine", "gpus": 1}, "1.*engine.device.*'cpu'"),
        ({"engine": {"device": "cuda"}}, {"role": "engine"}, "0.*engine.device.*'cuda'.*gpus=1"),
        ({"trainer": {"devices": 2, "device": "cuda"}}, {"role": "trainer"}, "trainer.device.*'cuda'"),
    ],
)
def test_gpus_that_the_processes_of_a_bundle_can_not_use_are_refused(config, bundle, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        held(MODEL | config, bundles=[bundle])
    assert refused.value.field == "resources.bundles.0.gpus"


PARALLEL = VLLM | {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("config", "bundle", "said"),
    [
        ({"engine": PARALLEL}, {"gpus": 1}, "1.*vLLM.*worker.*2"),
        ({"engine": PARALLEL}, {"gpus": 4}, r"\(policies x.*gpus=2"),
        ({"engine": PARALLEL}, {}, "0, and.*worker"),
        ({"engine": VLLM}, {"gpus": 0.5}, "take 1"),
        ({"engine": {"workers": [{}, PARALLEL]}}, {"gpus": 2}, "'engine'.*computes.*GPU"),
        ({"engine": VLLM | {"threads": 3}}, {"cpus": 2}, "2.*engine.threads.*3"),
        ({"engine": FOUND}, {}, "'engine'.*servers"),
        ({"engine": {"workers": [{}, VLLM]}}, {"count": 3}, "3.*engine.replicas.*2"),
    ],
)
def test_a_bundle_that_vllm_can_not_use_is_refused(config, bundle, said):
    with pytest.raises(InvalidRequest, match=said):
        held(MODEL | config, bundles=[{"role": "engine"} | bundle])


@pytest.mark.parametrize(
    ("config", "gpus", "needed"),
    [
        ({"engine": PARALLEL}, 0, 2),
        ({"engine": PARALLEL | {"replicas": 2}}, 3, 4),
        ({"engine": VLLM | {"replicas": 2}}, 1, 2),
        ({"engine": VLLM}, 0.5, 1),
        ({"engine": VLLM, "policies": {"a": {}, "b": {"frozen": True}}}, 1, 2),
    ],
)
def test_servers_beside_the_job_that_have_too_few_gpus_are_refused(config, gpus, needed):
    config = ({} if "policies" in config else MODEL) | config
    with pytest.raises(InvalidRequest, match=f"{gpus}.*vLLM.*job.*{needed}"):
        held(config, gpus=gpus)
    assert held(config, gpus=needed).gpus == needed


def test_each_vllm_server_of_a_bundle_has_its_gpus():
    config = MODEL | {"engine": PARALLEL | {"replicas": 3}}
    found = held(config, bundles=[{"role": "engine", "cpus": 4, "gpus": 2}])
    assert [(part.cpus, part.gpus) for part in found.parts] == [(1, 0), (4, 2), (4, 2), (4, 2)]
    mixed = MODEL | {"engine": {"workers": [{}, VLLM]}}
    assert held(mixed, bundles=[{"role": "engine", "gpus": 1}]).bundles[0].count == 2
    assert held(mixed, bundles=[{"role": "engine"}]).bundles[0].gpus == 0  # vLLM's build for CPUs
    assert held(MODEL | {"engine": VLLM}).gpus == 0


@pytest.mark.parametrize("engine", [VLLM, {"workers": [{}, VLLM]}])
def test_weights_are_not_broadcast_to_vllm_in_a_bundle(engine):
    def sending(transfer: str) -> dict:
        broadcast = VLLM | {"weight_transfer": transfer}
        return MODEL | {"engine": broadcast if "workers" not in engine else {"workers": [{}, broadcast]}}

    with pytest.raises(InvalidRequest, match=r"'gloo'.*vLLM"):
        held(sending("gloo"), bundles=[{"role": "engine"}])
    assert held(sending("file"), bundles=[{"role": "engine"}]).bundles
    assert held(sending("gloo")).cpus > 1  # beside the job's own process, which sends them


def test_gpus_that_the_processes_of_a_bundle_can_use_are_held():
    assert held(MODEL, bundles=[{"role": "engine", "gpus": 0.5}]).bundles[0].gpus == 0.5
    assert held(MODEL | RANKS, bundles=[{"role": "trainer", "gpus": 1}]).bundles[0].gpus == 1
    games = {"engine": {"kind": "fake"}, "environment": {"name": "frozen-lake", "runners": 2}}
    several = [{"role": "engine", "gpus": 2}, {"role": "runner", "gpus": 2}]  # no model, or what an environment needs
    assert [one.gpus for one in held(games, bundles=several).bundles] == [2, 2]


def test_a_bundle_may_hold_a_part_of_a_core_or_a_gpu_and_no_core():
    config = MODEL | {"engine": {"replicas": 2}, "trainer": {"devices": 2, "threads": 4}}
    bundles = [{"role": "engine", "cpus": 0, "gpus": 1}, {"role": "trainer", "cpus": 4}]
    assert [part.cpus for part in held(config, bundles=bundles).parts] == [1, 0, 0, 4, 4]
    assert held(MODEL, bundles=[{"role": "engine", "cpus": 0.5}]).bundles[0].cpus == 0.5


def test_the_only_engine_of_a_job_may_have_a_bundle():
    found = held(MODEL, bundles=[{"role": "engine", "cpus": 2}])
    assert (found.cpus, found.bundles[0].count) == (1, 1)


def test_resources_come_back_from_the_store_and_in_answers():
    config = MODEL | {"engine": {"replicas": 2}, "environment": {"name": "frozen-lake", "runners": 3}}
    asked = {"bundles": [{"role": "engine", "gpus": 1, "gpu_kind": "A100"}, {"role": "runner"}], "labels": {"a": "b"}}
    found = held(config, **asked)
    for resources in (found, Resources(cpus=2)):
        assert stored(resources_text(resources)) == resources
    again = body_of(found).model_dump(exclude_unset=False)
    assert resources_of(ResourcesBody.model_validate(again | {"cpus": 1}), parse_config(config), 0) == found
