"""What a job of a service can't reach, and what can't be done to its neighbours: real jobs on a real cluster."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from service import GAMES, LONG, Service, until

from palestra.models.catalog import model_folder
from palestra.process.child import MALLOC_VARIABLE, malloc_without_caches
from palestra_service.ray.job_environment import NAMES, PREFIXES

pytestmark = pytest.mark.service
SECRETS = {
    "PALESTRA_API_KEY": "a-key-of-the-operator",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-operator",
    "HF_TOKEN": "hf_token_of_the_operator",
    "HTTPS_PROXY": "http://user:password-of-the-operator@127.0.0.1:1",
}
SERVED = {"kind": "inference", "policies": {"policy": {"model": "models/private", "max_context": 64}}}
EATER = LONG | {"rollout": {"group_size": 10**8, "groups_per_step": 1}}


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    """Started in a folder with a model, by an operator with secrets, who lets jobs ask for as much as they like."""
    folder = tmp_path_factory.mktemp("walls")
    cwd, hub = folder / "here", folder / "hub"
    shutil.copytree(model_folder("tiny-random"), cwd / "models" / "private")
    known = hub / "hub" / "models--org--tiny"
    shutil.copytree(model_folder("tiny-random"), known / "snapshots" / "0123456789")
    (known / "refs").mkdir()
    (known / "refs" / "main").write_text("0123456789")
    shutil.copytree(model_folder("tiny-random"), folder / "listed")
    rules = folder / "rules.toml"
    rules.write_text(
        f'[models]\nhouse = "{folder / "listed"}"\n'
        '[caps]\n"rollout.group_size" = "none"\n'
        '"rollout.group_size x groups_per_step x (1 + max_staleness)" = "none"\n'
    )
    options = ("--cpus", "6", "--memory-gib", "2", "--rules", str(rules), "--pass-env", "PASSED")
    settings = SECRETS | {"PASSED": "on", "HF_HOME": str(hub)}
    with Service(folder, options=options, cwd=cwd, settings=settings) as service:
        yield service.start()


def process_of(service: Service, job_id: str) -> psutil.Process:
    (process,) = until(lambda: service.processes_of(job_id), "the job has a process")
    return process


def ended(job, state: str, seconds: float = 120.0):
    return until(lambda: (view := job.view()).state == state and view, f"the job is {state}", seconds)


def test_a_job_has_named_variables_of_the_operator_and_an_empty_folder(service):
    job = service.client().submit(LONG)
    until(lambda: job.view().state == "running", "it runs")
    process = process_of(service, job.job_id)
    held = (Path("/proc") / str(process.pid) / "environ").read_bytes()
    family = [process, *process.parents()]
    for secret in SECRETS.values():
        assert secret.encode() not in held
    raylet = next(parent for parent in family if "raylet" in parent.name())
    others = {name for name in (*process.environ(), *raylet.environ()) if not name.startswith(PREFIXES)} - NAMES
    assert others <= {"PASSED", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "SPT_NOENV", "PYTHONBREAKPOINT", "LD_PRELOAD"}  # Ray's
    assert process.environ()["PASSED"] == "on"
    assert process.environ().get(MALLOC_VARIABLE, "") == malloc_without_caches(os.environ.get(MALLOC_VARIABLE, ""))
    assert process.cwd() == str((service.state / "jobs" / job.job_id / "work").resolve())
    assert list(Path(process.cwd()).iterdir()) == []
    assert not Path(raylet.cwd()).is_relative_to(service.cwd)
    job.cancel()
    ended(job, "cancelled")


def test_a_folder_where_the_service_was_started_is_no_model(service):
    assert (service.cwd / SERVED["policies"]["policy"]["model"]).is_dir()
    job = service.client().submit(SERVED, restarts=0)
    view = ended(job, "failed")
    assert "model 'models/private' is not in the hub's cache" in view.reason
    assert not [artifact for artifact in job.artifacts() if "safetensors" in artifact.path]


@pytest.mark.parametrize("model", ["org/tiny", pytest.param("house", marks=pytest.mark.long)])
def test_models_of_the_hub_and_of_the_operators_list_are_served(service, model):
    job = service.client().submit({"kind": "inference", "policies": {"policy": {"model": model, "max_context": 64}}})
    until(lambda: job.view().state == "running" or job.view().reason.startswith("model"), "it runs", 120)
    assert job.view().state == "running", job.view()
    assert f"serving {model}" in "".join(job.logs())
    job.cancel()
    ended(job, "cancelled")


@pytest.mark.parametrize("asked", [1.0, pytest.param(0.0, marks=pytest.mark.long)])
def test_a_job_that_eats_memory_ends_alone_with_the_reason(service, asked):
    control = service.client()
    neighbour = control.submit(LONG, name="neighbour")
    until(lambda: neighbour.view().state == "running", "the neighbour runs")
    eater = control.submit(EATER, memory_gib=asked, name="eater")
    view = ended(eater, "failed", 300)
    said = "asked for 1 GiB" if asked else "asked for none, and its share of the node is 2 GiB"
    assert "out of memory: its processes had " in view.reason
    assert said in view.reason
    assert view.restarts_left == 3
    assert "out of memory" in "".join(eater.logs())
    assert service.processes_of(eater.job_id) == []
    assert (neighbour.view().state, neighbour.view().starts) == ("running", 1)
    neighbour.cancel()
    ended(neighbour, "cancelled")


@pytest.mark.parametrize("stuck", ["stopped", pytest.param("busy", marks=pytest.mark.long)])
def test_a_job_that_does_not_answer_is_cancelled_within_seconds(service, stuck):
    job = service.client().submit(EATER if stuck == "busy" else LONG)
    until(lambda: job.view().state == "running", "it runs")
    if stuck == "stopped":
        process_of(service, job.job_id).send_signal(signal.SIGSTOP)
    began = time.monotonic()
    job.cancel()
    view = ended(job, "cancelled")
    assert time.monotonic() - began < 20
    until(lambda: not service.processes_of(job.job_id), "its process is gone")
    if stuck == "stopped":
        assert "did not answer" in view.reason


def test_a_job_that_answers_saves_before_it_ends(service):
    job = service.client().submit(LONG)
    until(lambda: any(event.kind == "step" and event.data["step"] for event in job.events()), "it has trained")
    job.cancel()
    ended(job, "cancelled")
    assert any("checkpoints/" in artifact.path for artifact in job.artifacts())
    assert job.view().reason == "cancelled by admin"


def test_a_job_of_small_games_completes_as_before(service):
    assert service.client().submit(GAMES).wait().state == "completed"
