"""What an operator allows: every number has a cap, or a reason for having none, and models come from a list."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest

from palestra.algorithms.registry import create_algorithm
from palestra.config import JobConfig, parse_config, reference_of
from palestra.config.section import Section
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.fake import FakeEngineConfig
from palestra.errors import ConfigError, InvalidRequest
from palestra.learner import policy_spec
from palestra.types.states import JobState
from palestra_control.jobs import Resources
from palestra_engines.vllm.config import VllmEngineConfig
from palestra_service.api.submission import _checked
from palestra_service.jobs.engine_rules import EngineRules
from palestra_service.jobs.orders import _with_operators_settings
from palestra_service.jobs.rules import CAPS, OPEN_EPISODES, TIME_LIMIT, Rules, load_rules
from palestra_service.jobs.shared_jobs import check_shared
from palestra_service.placement.bases import BaseLimits
from unit.control.launching import FakeLauncher
from unit.control.scheduling import in_state, scheduling, submit
from unit.control.uncapped import EXEMPT
from unit.waiting import until

pytestmark = pytest.mark.ci

WITH_VLLM = Rules(engines=EngineRules(programs={"vllm": Path("/venv/bin/python")}))


def numeric_keys(section: type[Section], prefix: str) -> Iterator[str]:
    """The dotted keys of a configuration that take a number, `*` for the names that a user chooses."""
    for name, known in section.model_fields.items():
        for key, annotation in _leaves(known.annotation, f"{prefix}{name}"):
            if isinstance(annotation, type) and issubclass(annotation, Section):
                for one in annotation.alternatives():
                    yield from numeric_keys(one, f"{key}.")
            elif annotation in (int, float):
                yield key


def _leaves(annotation: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The types that an annotation is made of, each once, with the key at which a value of it stands."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _leaves(get_args(annotation)[0], key)
    elif origin is dict:
        yield from _leaves(get_args(annotation)[1], f"{key}.*")
    elif origin is not None:
        yield from dict.fromkeys(found for part in get_args(annotation) for found in _leaves(part, key))
    else:
        yield key, annotation


def test_every_number_of_a_configuration_has_a_cap_or_a_reason_for_having_none():
    # A policy's own algorithm has the caps of the job's, as the tests of submissions see.
    keys = {key.removeprefix("policies.*.") if ".algorithm." in key else key for key in numeric_keys(JobConfig, "")}
    keys = {key.replace("engine.workers.", "engine.") for key in keys}  # those of each kind of workers, too
    keys = {key.replace("audit.judge.", "judge.") for key in keys}
    assert keys - CAPS.keys() - EXEMPT.keys() == set(), "a new number needs a cap, or a stated reason"
    assert CAPS.keys() - keys == {OPEN_EPISODES}
    assert EXEMPT.keys() <= keys
    assert not CAPS.keys() & EXEMPT.keys()


def set_to(key: str, value: float) -> dict:
    """A configuration in which one key has a value; the names that a user chooses have dots in them."""
    *sections, name = key.split(".")
    sections = ["a.b" if part == "*" else part for part in sections]
    found: dict = {("a.b" if name == "*" else name): value}
    if sections[:1] == ["judge"]:
        found = {"kind": "relative", "policy": "judge", **found}
    if sections[:1] == ["engine"]:  # the keys of one kind are refused beside another
        kinds = (FakeEngineConfig, EmbeddedEngineConfig, VllmEngineConfig)
        found["kind"] = next(one.model_fields["kind"].default for one in kinds if name in one.model_fields)
    for section in reversed(sections):
        found = {section: found}
    if key == "environment.runners":
        found["environment"]["name"] = "gomoku"  # which they play
    if key == "environment.agent_settings.*":
        found["environment"]["agent"] = "tools"
    if key.startswith("algorithm.critic."):
        found["algorithm"]["name"] = "ppo"
    if key.startswith("algorithm.replay."):
        found["algorithm"]["name"] = "sac"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in CAPS if key != OPEN_EPISODES])
async def test_a_value_over_its_cap_is_refused_with_key_value_and_cap(http, plane, key):
    object.__setattr__(plane, "rules", WITH_VLLM)
    cap = CAPS[key]
    value = int(cap) + 1
    config = set_to(key, value)
    answer = await http.post("/jobs", json={"config": config})
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert key.replace("*", "a.b") in said
    assert f"{value:,}" in said
    assert f"{cap:,}" in said


async def test_values_at_their_caps_are_taken(http, plane):
    object.__setattr__(plane, "rules", WITH_VLLM)
    for key, cap in CAPS.items():
        if key == OPEN_EPISODES:
            continue
        gpus = cap if key == "engine.tensor_parallel" else 0  # that many share a model
        answer = await http.post("/jobs", json={"config": set_to(key, cap), "resources": {"gpus": gpus}})
        assert answer.status_code == 201, (key, answer.text)


@pytest.mark.slow
async def test_many_groups_of_many_episodes_are_refused_though_each_number_is_small(http):
    answer = await http.post("/jobs", json={"config": {"rollout": {"group_size": 1024, "groups_per_step": 1024}}})
    assert answer.status_code == 400
    assert "1,048,576" in answer.json()["error"]["message"]


async def test_a_job_that_was_taken_before_a_cap_was_lowered_is_not_taken_again(http, plane):
    job = (await http.post("/jobs", json={"config": {"steps": 50}})).json()["job_id"]
    object.__setattr__(plane, "rules", Rules(caps={"steps": 10}))
    answer = await http.post(f"/jobs/{job}/resubmit")
    assert answer.status_code == 400
    assert "steps is 50" in answer.json()["error"]["message"]


async def test_no_job_runs_for_longer_than_the_operator_allows(http, plane):
    body = {"config": {}, "time_limit_seconds": 7200}
    free = (await http.post("/jobs", json=body)).json()
    assert free["time_limit_seconds"] == 7200
    assert (await http.post("/jobs", json={"config": {}})).json()["time_limit_seconds"] is None
    object.__setattr__(plane, "rules", Rules(caps={**CAPS, TIME_LIMIT: 3600}))
    for answer in (await http.post("/jobs", json=body), await http.post(f"/jobs/{free['job_id']}/resubmit")):
        assert answer.status_code == 400, answer.text
        assert "time_limit_seconds is 7,200, and this service allows at most 3,600" in answer.json()["error"]["message"]
    for asked, given in ((60, 60), (3600, 3600), (None, 3600)):
        job = (await http.post("/jobs", json=body | {"time_limit_seconds": asked})).json()
        assert job["time_limit_seconds"] == given
        again = (await http.post(f"/jobs/{job['job_id']}/resubmit")).json()
        assert again["time_limit_seconds"] == given


@pytest.mark.parametrize(("value", "most"), [("3600", 3600), ("'none'", math.inf)])
def test_the_longest_time_limit_is_a_cap_of_the_rules(tmp_path, value, most):
    (tmp_path / "rules.toml").write_text(f"[caps]\ntime_limit_seconds = {value}\n")
    rules = load_rules(tmp_path / "rules.toml")
    assert rules.caps == {**CAPS, TIME_LIMIT: most}
    assert rules.time_limit(None) == (None if most == math.inf else most)


def test_an_operator_changes_caps_and_names_models(tmp_path):
    (tmp_path / "house").mkdir()
    path = tmp_path / "rules.toml"
    path.write_text(
        'hub_models = false\n[models]\nhouse = "house"\nqwen = "Qwen/Qwen2.5"\n'
        '[caps]\nsteps = 7\n"checkpoint.keep" = "none"\n[caps.rollout]\ngroup_size = 4\n'
    )
    rules = load_rules(path)
    assert not rules.hub_models
    assert rules.models == {"house": str(tmp_path / "house"), "qwen": "Qwen/Qwen2.5"}
    assert rules.caps == {**CAPS, "steps": 7, "checkpoint.keep": float("inf"), "rollout.group_size": 4}
    rules.check(parse_config({"steps": 7, "rollout": {"group_size": 4}, "checkpoint": {"keep": 10**9}}))
    with pytest.raises(ConfigError, match=r"rollout\.group_size.*5.*4"):
        rules.check(parse_config({"steps": 7, "rollout": {"group_size": 5}}))


@pytest.mark.parametrize(
    ("key", "host", "refused"),
    [
        ("hosts", "images.example.com", None),
        ("private_hosts", "10.0.0.7:8080", None),
        ("hosts", "10.0.0.7:8080", r"allows.*images\.example\.com.*picture_hosts"),
        # Whose name leads where its owner wants is not exempt from the look at its addresses.
        ("private_hosts", "images.example.com", r"10\.0\.0\.7:8080.*private_picture_hosts"),
    ],
)
def test_pictures_are_fetched_from_the_operators_hosts(tmp_path, key, host, refused):
    path = tmp_path / "rules.toml"
    path.write_text('picture_hosts = ["Images.example.com"]\nprivate_picture_hosts = ["10.0.0.7:8080"]\n')
    config = parse_config({"pictures": {key: [host]}})
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        load_rules(path).check(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("caps", "valid.*TOML"),
        ("[cap]\nsteps = 1", "you.*'caps'"),
        ('[caps]\n"rollout.groupsize" = 1', r"you.*'rollout\.group_size'"),
        ("[caps]\nsteps = 0", "above 0"),
        ("[caps]\nsteps = true", "above 0"),
        ("[caps]\nsteps = nan", "above 0"),
        ('[models]\nhouse = "./none"', "such folder"),
        ('[models]\ntiny-random = "org/model"', "another name"),
        ("[models]\nhouse = 1", r"models\.house"),
        ('[models]\nhouse = ""', r"models\.house"),
        ("hub_models = 1", "hub_models"),
        ("[environment]\nallowed_host = 1", "'allowed_hosts'"),
        ("[environment]\nprograms = 1", r"environment\.programs"),
        ('trackers = "wandb"', "trackers"),
        ("trackers = [1]", r"trackers\.0"),
        ("picture_hosts = 1", "picture_hosts"),
        ('private_picture_hosts = "a"', "private_picture_hosts"),
        ('[environment.allowed_hosts]\n"nim.example" = "KEY"', r"environment\.allowed_hosts.*nim\.example"),
        ('[environment.allowed_hosts]\n"http://nim.example:1" = "KEY"', r"environment\.allowed_hosts.*nim\.example"),
        ('[environment.allowed_hosts]\n"nim.example:1" = 3', r"environment\.allowed_hosts.*nim\.example"),
        ('[environment.allowed_hosts]\n"nim.example:1" = "A KEY"', r"environment\.allowed_hosts.*nim\.example"),
    ],
)
def test_what_can_be_no_rule_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_rules(tmp_path / "rules.toml")


async def test_models_are_the_operators_or_the_hubs_as_the_rules_say(http, plane):
    object.__setattr__(plane, "rules", Rules(models={"house": "/srv/house"}, hub_models=False))
    for model, status in (("house", 201), ("tiny-random", 201), ("org/model", 422), ("models/private", 422)):
        answer = await http.post("/jobs", json={"config": {"policies": {"p": {"model": model}}}})
        assert answer.status_code == status, answer.text
        assert (status == 201) or "'house'" in answer.json()["error"]["message"]


NIM = "http://10.0.0.7:7500"


@pytest.mark.slow
@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.8:7500",
        "http://10.0.0.7",
        "http://localhost:7500",
        "http://127.0.0.1:7500",
        "http://169.254.169.254/latest",
        "http://10.0.0.7:7500@127.0.0.1:22",
        "http://user@10.0.0.7:7500",
        "file:///etc/passwd",
        "nonsense",
        "http://[::1]:7500",
        "http://10.0.0.7:99999999",
    ],
)
async def test_a_job_connects_to_no_environment_server_that_the_operator_does_not_name(http, plane, url):
    object.__setattr__(plane, "rules", Rules(environment_hosts={"10.0.0.7:7500": "NIM_KEY"}))
    answer = await http.post("/jobs", json={"config": {"environment": {"url": url}}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "config.environment.url"), answer.text


def test_the_key_of_an_environment_server_is_in_the_variable_that_the_operator_names(tmp_path):
    (tmp_path / "rules.toml").write_text('[environment.allowed_hosts]\n"10.0.0.7:7500" = "NIM_KEY"\n')
    rules = load_rules(tmp_path / "rules.toml")
    given = {"environment": {"url": NIM, "key_variable": "HF_TOKEN"}, "tasks": {}}
    _checked(given, rules)
    assert _with_operators_settings(given, rules)["environment"] == {"url": NIM, "key_variable": "NIM_KEY"}
    with pytest.raises(InvalidRequest, match=r"allows none"):
        _checked(given, Rules())


@pytest.mark.parametrize("name", ["terminal", "desktop", "miniwob", "miniwob/click-button"])
async def test_no_job_starts_programs_unless_the_operator_allows_it(http, plane, tmp_path, name):
    answer = await http.post("/jobs", json={"config": {"environment": {"name": name}}})
    assert answer.status_code in (400, 422), answer.text
    assert "its operator has to allow that" in answer.text
    (tmp_path / "rules.toml").write_text("[environment]\nprograms = true\n")
    object.__setattr__(plane, "rules", load_rules(tmp_path / "rules.toml"))
    answer = await http.post("/jobs", json={"config": {"environment": {"name": name}}})
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("environment", [{"name": "harbor", "path": "/etc"}, {"name": "harbor//etc"}])
async def test_no_job_names_a_folder_of_the_service(http, plane, tmp_path, environment):
    (tmp_path / "rules.toml").write_text("[environment]\nprograms = true\n")
    object.__setattr__(plane, "rules", load_rules(tmp_path / "rules.toml"))
    answer = await http.post("/jobs", json={"config": {"environment": environment}})
    assert answer.status_code in (400, 422), answer.text
    assert "which no job may name" in answer.text


async def test_no_job_runs_a_harness(http):
    answer = await http.post("/jobs", json={"config": {"harness": {"name": "pi", "score": "score.py"}}})
    assert answer.status_code in (400, 422), answer.text
    assert "palestra worker --harness" in answer.text


@pytest.mark.parametrize("name", ["Terminal", "os:system", "none", "gomoku/9", "../arithmetic", "x" * 5000])
async def test_an_environment_that_does_not_exist_is_refused_when_the_job_is_submitted(http, name):
    answer = await http.post("/jobs", json={"config": {"environment": {"name": name}}})
    assert answer.status_code in (400, 422), answer.text
    job = (await http.post("/jobs", json={"config": {"environment": {"name": "gomoku"}}})).json()["job_id"]
    answer = await http.post("/jobs", json={"from_job": job, "config": {"environment": {"name": name}}})
    assert answer.status_code in (400, 422), answer.text


async def test_no_job_starts_a_tracker_that_its_operator_has_not_listed(http, plane, tmp_path):
    body = {"config": {"tracking": ["tensorboard"]}}
    assert (await http.post("/jobs", json=body)).json()["error"]["code"] == "config_error"
    (tmp_path / "rules.toml").write_text('trackers = ["tensorboard"]\n')
    object.__setattr__(plane, "rules", load_rules(tmp_path / "rules.toml"))
    assert (await http.post("/jobs", json=body)).status_code == 201
    body = {"config": {"tracking": ["tensorboard", "wandb"]}}
    assert (await http.post("/jobs", json=body)).status_code == 400


async def test_a_reference_is_a_model_like_any_other(http, plane):
    object.__setattr__(plane, "rules", Rules(models={"house": "/srv/house"}, hub_models=False))
    for model, status in (("house", 201), ("org/model", 422), ("/etc", 422), (None, 201)):
        answer = await http.post("/jobs", json={"config": {"algorithm": {"kl": {"reference": model}}}})
        assert answer.status_code == status, answer.text
        assert (status == 201) or answer.json()["error"]["param"] == "config.algorithm.kl.reference"


def test_a_reference_of_the_list_is_loaded_from_where_the_operator_says():
    rules = Rules(models={"house": "/srv/house"})
    config = parse_config({"algorithm": {"kl": {"reference": "house"}}})
    assert rules.places(config, started_from_job=True) == {reference_of("policy"): "/srv/house"}
    spec = policy_spec(config, create_algorithm(config.algorithm), "policy", {reference_of("policy"): "/srv/house"})
    assert (spec.model, spec.reference, spec.critic) == ("SmolLM2-135M-Instruct", "/srv/house", None)
    start = parse_config({"algorithm": {"name": "ppo", "kl": {}}})
    spec = policy_spec(start, create_algorithm(start.algorithm), "policy", {"policy": "/runs/own"})
    assert (spec.model, spec.reference, spec.critic) == ("/runs/own", "/runs/own", "states")


async def test_a_model_of_the_list_is_loaded_from_where_the_operator_says(sqlite_store, tmp_path):
    launcher = FakeLauncher()
    rules = Rules(models={"house": "/srv/house"})
    async with scheduling(sqlite_store, tmp_path, launcher, rules=rules):
        for model, weights in (("house", {"p": "/srv/house"}), ("org/model", {})):
            job = await submit(sqlite_store, config={"policies": {"p": {"model": model}}})
            await until(in_state(sqlite_store, job.job_id, JobState.RUNNING))
            order = launcher.servers[job.job_id].order
            assert order.weights == weights
            assert order.config["policies"]["p"]["model"] == model  # nobody is shown the folder
            assert order.folder.name == job.job_id
        job = await submit(sqlite_store, config={"policies": {"p": {"model": "was-on-the-list"}}})
        await until(in_state(sqlite_store, job.job_id, JobState.FAILED))
        assert "no folder" in (await sqlite_store.job(None, job.job_id)).reason


def test_the_operator_sets_what_base_servers_hold(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text('[bases]\ncpus = 4\ngpus = 0.5\nmemory_gib = 8\nslots = 3\nidle_seconds = 1.5\ndtype = "float32"\n')
    found = load_rules(path).bases
    assert found == BaseLimits(
        resources=Resources(cpus=4.0, gpus=0.5, memory_gib=8.0), slots=3, idle_seconds=1.5, dtype="float32"
    )
    path.write_text("")
    assert load_rules(path).bases == BaseLimits()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bases = 3", "bases"),
        ("[bases]\nidle = 3", "mean 'idle_seconds'"),
        ("[bases]\nadapters = 0", "bases.adapters"),
        ("[bases]\nadapters = 1.5", "bases.adapters"),
        ("[bases]\nidle_seconds = true", "bases.idle_seconds"),
        ("[bases]\nidle_seconds = nan", "bases.idle_seconds"),
        ("[bases]\ncpus = -1", "-1.0"),
        ("[bases]\ngpus = 1.5", "whole ones"),
        ('[bases]\ndtype = "int8"', "bases.dtype"),
    ],
)
def test_settings_of_base_servers_that_can_not_be_are_refused(tmp_path, text, said):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_rules(path)


@pytest.mark.parametrize(
    ("policies", "key", "said"),
    [
        ({"p": {"base": "unix:/x"}}, "config.policies.p.base", "service chooses"),
        (
            {"p": {"base": "shared"}, "q": {"base": "shared", "model": "tiny-random"}},
            "config.policies.q.model",
            "base.*model",
        ),
        ({"p": {"base": "shared"}, "q": {"base": "shared"}}, "config.policies", "2.*adapters"),
    ],
)
def test_a_shared_base_that_can_not_be_is_refused(policies, key, said):
    whole = {name: {"adapter": {"rank": 4}} | policy for name, policy in policies.items()}
    config = parse_config({"kind": "inference", "policies": whole})
    limits = BaseLimits(adapters=1)
    training = config.model_copy(update={"kind": "training"})
    with pytest.raises(InvalidRequest, match=said) as refused:
        check_shared(training, limits)
    assert refused.value.field == key


def test_a_job_of_several_environments_is_refused():
    mixed = parse_config({"environments": [{"id": "sums", "name": "arithmetic"}]})
    with pytest.raises(ConfigError, match=r"environments.*several"):
        Rules().check(mixed)
    Rules().check(mixed.each_environment["sums"])
