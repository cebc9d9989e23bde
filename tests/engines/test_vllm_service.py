"""vLLM for the jobs of a service: started by the operator's rule, killed, cancelled, and in a bundle of its own."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from service import GAMES, Service, lives, metrics_of, until

from engines.models import vllm_python, write_model
from palestra.errors import InvalidRequest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]
ENGINE = {"kind": "vllm", "dtype": "float32", "max_batch": 16, "threads": 1}
JOB = {name: value for name, value in GAMES.items() if name not in ("deterministic", "engine")} | {
    "policies": {"policy": {"model": "house", "max_context": 2048, "sampling": {"max_tokens": 4}}},
    "engine": ENGINE,
    "trainer": {"threads": 1, "dtype": "float32"},
    "rollout": {"group_size": 4, "groups_per_step": 2},
    "steps": 4,
}
START_SECONDS = 400.0  # of two servers, on a busy machine


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("operator")
    model, rules = write_model(folder / "model"), folder / "rules.toml"
    rules.write_text(f'[models]\nhouse = "{model}"\n[engines.vllm]\npython = "{vllm_python()}"\n')
    options = ("--cpus", "6", "--gpus", "0", "--memory-gib", "16", "--rules", str(rules))
    with Service(tmp_path_factory.mktemp("service"), options) as service:
        yield service.start()


def servers_of(service: Service, job_id: str) -> list[psutil.Process]:
    """The processes of a job's vLLM, of which each writes into the job's log of its engine."""
    return [one for one in service.processes_of(job_id) if "vllm.entrypoints" in " ".join(one.cmdline())]


def trained(service: Service, job_id: str) -> int:
    """How many steps have a checkpoint."""
    return len(list((service.state / "jobs" / job_id / "run" / "checkpoints").glob("step-*")))


def is_running(job) -> bool:
    view = job.view()
    assert view.state in ("queued", "starting", "running"), (view, job.logs())
    return view.state == "running"


def computing(job_id: str, service: Service) -> psutil.Process:
    """The process of a job's vLLM that has the model."""
    (leader,) = [one for one in servers_of(service, job_id) if "keeper.py" not in " ".join(one.cmdline())][:1]
    family = [leader, *leader.children(recursive=True)]
    return max(family, key=lambda one: one.memory_info().rss)


def test_two_jobs_have_a_server_each_which_is_killed_or_cancelled_with_its_job(service):
    control = service.client()
    hurt = control.submit(JOB, cpus=1, memory_gib=6)
    long = control.submit(JOB | {"steps": 100_000}, cpus=1, memory_gib=6)
    assert hurt.view().resources.cpus == 2.0, "its own core, and one for its server"
    assert hurt.view().config["engine"] == ENGINE, "nobody is shown paths of the service"
    until(lambda: is_running(hurt) and is_running(long), "both run", START_SECONDS)
    assert servers_of(service, hurt.job_id)
    assert servers_of(service, long.job_id)
    until(lambda: trained(service, hurt.job_id) >= 1, "it has trained", 200)

    killed = computing(hurt.job_id, service)
    killed.kill()
    view = hurt.wait()
    assert (view.state, view.starts) == ("completed", 1), (view, hurt.logs())
    assert "another one is started" in "".join(hurt.logs())
    rows = metrics_of(service, hurt.job_id)
    assert [row["step"] for row in rows if row["step"]] == [1, 2, 3, 4], "each step once"
    until(lambda: not service.processes_of(hurt.job_id), "nothing of it is left", 30)

    until(lambda: trained(service, long.job_id) >= 1, "the other one trains", 200)
    left = servers_of(service, long.job_id)
    assert left
    long.cancel()
    assert long.wait().state == "cancelled"
    until(lambda: not service.processes_of(long.job_id), "nothing of it is left", 30)
    until(lambda: not any(map(lives, left)), "its servers are gone", 30)


def test_a_server_in_a_bundle_of_its_own_is_replaced_and_the_job_goes_on(service):
    control = service.client()
    bundle = {"role": "engine", "cpus": 1, "memory_gib": 6}
    job = control.submit(JOB | {"steps": 6}, cpus=1, bundles=[bundle])
    assert [part.count for part in job.view().resources.bundles] == [1]
    until(lambda: is_running(job), "it runs", START_SECONDS)
    until(lambda: trained(service, job.job_id) >= 1, "it has trained", 200)
    computing(job.job_id, service).kill()
    view = job.wait()
    assert (view.state, view.starts) == ("completed", 1), (view, job.logs())
    rows = metrics_of(service, job.job_id)
    assert [row["step"] for row in rows if row["step"]] == [1, 2, 3, 4, 5, 6]
    assert "another one is started" in "".join(job.logs())
    until(lambda: not service.processes_of(job.job_id), "nothing of it is left", 30)


def test_what_a_job_may_not_name_is_refused_with_one_line(service):
    control = service.client()
    for engine, said in (
        (ENGINE | {"python": "/bin/sh"}, "names a program, which only the operator"),
        ({"kind": "vllm", "url": "http://169.254.169.254"}, "the operator of this service allows none"),
        (ENGINE | {"tensor_parallel": 2}, "resources.gpus is 0, and the vLLM servers of the job take 2 whole ones"),
    ):
        with pytest.raises(InvalidRequest, match=said) as refused:
            control.submit(JOB | {"engine": engine})
        assert "\n" not in str(refused.value)


def test_a_server_that_can_not_be_started_fails_its_job_with_the_reason(service):
    control = service.client()
    job = control.submit(JOB | {"engine": ENGINE | {"cache_gib": 500}}, cpus=1, memory_gib=4)
    view = job.wait()
    assert view.state == "failed"
    assert "GiB are missing" in view.reason
    assert not service.processes_of(job.job_id)
