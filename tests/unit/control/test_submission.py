"""What may be submitted: kinds of jobs, and jobs that start from another one's weights."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import pytest

from palestra.config import parse_config
from palestra.trainer import checkpoint
from palestra.trainer.quarantine import Quarantine, write_quarantine
from palestra_service.api import submission
from palestra_service.jobs.scheduler import RUN
from palestra_service.rights import KeyLimits
from unit.control.building import submit
from unit.control.recording import play

pytestmark = pytest.mark.ci

TRAINED = {
    "name": "sums",
    "steps": 3,
    "policies": {"solver": {"model": "tiny-random", "max_context": 256}},
    "environment": {"name": "gomoku"},
}
LIMITED = {"rollout": {"max_claimed": KeyLimits().episodes_in_flight}}  # by the key with which it is submitted


async def trained(plane, *steps: int, tenant: str = "default") -> str:
    """A job with checkpoints of these steps."""
    job = await submit(plane.store, tenant, "ann", name="sums", config=TRAINED)
    for step in steps:
        fill = lambda path: (path / "weights.txt").write_text("w")  # noqa: E731
        folder = plane.scheduler.folder_of(job.job_id) / RUN / "checkpoints"
        checkpoint.write(folder, step, fill, {"step": step}, keep=9)
    return job.job_id


async def made(http, **body) -> dict:
    answer = await http.post("/jobs", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def refused(http, status: int, **body) -> str:
    answer = await http.post("/jobs", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "inference", "config": {}},
        {"config": {"kind": "inference"}},
        {"kind": "inference", "config": {"kind": "inference"}},
    ],
)
async def test_the_kind_may_stand_in_the_body_or_in_the_configuration(http, body):
    job = await made(http, **body)
    assert job["kind"] == job["config"]["kind"] == "inference"


@pytest.mark.slow
async def test_a_job_trains_unless_it_says_otherwise(http):
    assert (await made(http, config={}))["kind"] == "training"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unit.algorithms.own_algorithm:Surprise", "only where you call palestra.train yourself"),
        ("gpro", "did you mean 'grpo'"),
    ],
)
async def test_an_algorithm_is_one_of_the_servers_and_no_code_of_the_tenant(http, name, said):
    sys.modules.pop("unit.algorithms.own_algorithm", None)
    assert said in await refused(http, 400, config={"algorithm": {"name": name}})
    assert "unit.algorithms.own_algorithm" not in sys.modules


async def test_a_time_limit_is_kept_shown_and_resubmitted(http):
    assert (await made(http, config={}))["time_limit_seconds"] is None
    job = await made(http, config={}, time_limit_seconds=5400)
    assert job["time_limit_seconds"] == 5400.0
    again = await http.post(f"/jobs/{job['job_id']}/resubmit")
    assert (again.status_code, again.json()["time_limit_seconds"]) == (201, 5400.0)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, -1, 1e10, "90m", [], {}, "NaN", "Infinity"])
async def test_what_is_no_time_limit_is_refused_by_name(http, limit):
    assert "time_limit_seconds" in await refused(http, 422, config={}, time_limit_seconds=limit)


async def test_another_time_limit_is_another_request(http):
    headers = {"idempotency-key": "once"}
    bodies = ({"config": {}}, {"config": {}, "time_limit_seconds": 60}, {"config": {}, "time_limit_seconds": 60.5})
    answers = [await http.post("/jobs", json=body, headers=headers) for body in (*bodies, bodies[0])]
    assert [answer.status_code for answer in answers] == [201, 409, 409, 201]
    assert answers[0].json()["job_id"] == answers[3].json()["job_id"]


async def test_two_kinds_are_refused_by_name(http):
    assert "kind" in await refused(http, 400, kind="inference", config={"kind": "training"})
    assert "kind" in await refused(http, 400, kind="training", config={"kind": "inference"})


async def test_what_is_about_training_only_is_not_used_where_a_model_is_served(http):
    config = {"environment": {"name": "gomoku"}, "steps": 3, "evaluation": {"every_steps": 1}}
    job = (await http.post("/jobs", json={"kind": "inference", "config": config})).json()
    assert (job["kind"], job["state"]) == ("inference", "queued")


async def test_without_a_configuration_that_of_the_other_job_is_served(http, plane):
    source = await trained(plane, 1, 2, 10)
    job = await made(http, from_job=source)
    assert (job["kind"], job["name"], job["from_job"], job["from_step"]) == ("inference", "sums", source, 10)
    assert job["config"] == {key: TRAINED[key] for key in ("name", "steps", "policies")} | {"kind": "inference"}


async def test_training_may_start_from_a_checkpoint_too(http, plane):
    source = await trained(plane, 1, 2)
    job = await made(http, from_job=source, from_step=1, kind="training")
    assert (job["kind"], job["from_step"], job["config"]) == ("training", 1, TRAINED | {"kind": "training"} | LIMITED)
    again = await made(http, from_job=source, config={"steps": 7})
    assert again["config"] == {"steps": 7, "policies": {"policy": {"model": "tiny-random"}}} | LIMITED
    assert again["kind"] == "training"


async def test_another_model_than_that_of_the_checkpoint_is_refused(http, plane):
    source = await trained(plane, 1)
    policies = {"policy": {"model": "SmolLM2-135M-Instruct"}}
    assert "from_job trains 'tiny-random'" in await refused(http, 400, from_job=source, config={"policies": policies})


async def test_beside_frozen_policies_the_one_that_is_not_frozen_gets_the_model_of_the_checkpoint(http, plane):
    source = await trained(plane, 1)
    policies = {"old": {"model": "SmolLM2-135M-Instruct", "frozen": True}, "new": {"max_context": 64}}
    job = await made(http, from_job=source, config={"policies": policies, "roles": {"opponent": "old"}})
    assert job["config"]["policies"] == policies | {"new": {"max_context": 64, "model": "tiny-random"}}
    both = {"kind": "inference", "policies": {"a": {}, "b": {}}}
    assert "from_job gives its weights to one policy" in await refused(http, 400, from_job=source, config=both)


async def test_the_short_form_of_the_model_does_not_replace_the_checkpoint(http, plane):
    source = await trained(plane, 1)
    job = await made(http, from_job=source, config={"model": "tiny-random", "steps": 2})
    assert "model" not in job["config"]  # it would be read again when the job starts
    assert job["config"]["policies"] == {"policy": {"model": "tiny-random"}}


async def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(http, plane):
    source = await trained(plane, 4, 6)
    assert "it has those of 4, 6" in await refused(http, 404, from_job=source, from_step=5)
    assert "no checkpoint to start from" in await refused(http, 404, from_job=await trained(plane))


async def test_a_checkpoint_that_an_audit_holds_back_starts_no_job(http, plane):
    source = await trained(plane, 4, 6)
    checkpoints = plane.scheduler.folder_of(source) / RUN / "checkpoints"
    write_quarantine(checkpoints, Quarantine(since=5, step=6, reason="gamed"))
    assert (await made(http, from_job=source))["from_step"] == 4
    assert "quarantined since step 5" in await refused(http, 409, from_job=source, from_step=6)
    write_quarantine(checkpoints, Quarantine(since=2, step=6, reason="gamed"))
    assert "quarantined since step 2" in await refused(http, 409, from_job=source)


async def test_the_job_of_another_tenant_is_as_one_that_does_not_exist(http, plane):
    source, none = await trained(plane, 1, tenant="other"), "job-0000000000000000"
    hidden, missing = [(await refused(http, 404, from_job=job_id)) for job_id in (source, none)]
    assert hidden.replace(source, "") == missing.replace(none, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../other", "job/../../x", "/etc", ".", "job-0000000000000000/run"])
async def test_a_path_is_no_job(http, name):
    assert "no job" in await refused(http, 404, from_job=name)


async def test_neither_configuration_nor_job_is_no_job(http):
    assert "config, or from_job" in await refused(http, 422)
    assert "from_job, which is missing" in await refused(http, 422, config={}, from_step=3)


async def test_sent_again_it_is_the_same_job_though_there_is_a_newer_checkpoint(http, plane):
    source = await trained(plane, 1)
    headers = {"idempotency-key": "once"}
    first = await http.post("/jobs", json={"from_job": source}, headers=headers)
    fill = lambda path: (path / "weights.txt").write_text("w")  # noqa: E731
    checkpoint.write(plane.scheduler.folder_of(source) / RUN / "checkpoints", 2, fill, {"step": 2}, keep=9)
    again = await http.post("/jobs", json={"from_job": source}, headers=headers)
    assert first.json()["job_id"] == again.json()["job_id"]
    assert again.json()["from_step"] == 1
    other = await http.post("/jobs", json={"from_job": source, "from_step": 2}, headers=headers)
    assert other.status_code == 409


async def test_resubmitted_it_starts_from_the_same_checkpoint(http, plane):
    job = await made(http, from_job=await trained(plane, 1))
    again = (await http.post(f"/jobs/{job['job_id']}/resubmit")).json()
    assert (again["from_job"], again["from_step"], again["kind"]) == (job["from_job"], 1, "inference")


async def test_configurations_are_read_away_from_the_event_loop(http, plane, monkeypatch):
    """One may be as long as a body, and is read several times."""
    job_id, threads = await trained(plane, 3), set()

    def parse(*arguments):
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return parse_config(*arguments)

    monkeypatch.setattr(submission, "parse_config", parse)
    await made(http, config={})
    job = await made(http, from_job=job_id)
    assert (await http.post(f"/jobs/{job['job_id']}/resubmit")).status_code == 201
    assert threads == {"palestra-request"}


# Episodes of another job (`algorithm.from_run`)


async def played(plane, *rewards: float, tenant: str = "default", user: str = "ann", **more) -> str:
    """A job with completed training episodes of these rewards, one a second."""
    job = await submit(plane.store, tenant, user, name="sums", config=TRAINED, **more)
    await play(plane.scheduler.folder_of(job.job_id) / RUN, plane.store.clock, *rewards)
    return job.job_id


def learning(source: str, **algorithm) -> dict:
    return {"policies": TRAINED["policies"], "algorithm": {"name": "sft", "from_run": source} | algorithm}


@pytest.mark.slow
async def test_episodes_of_a_job_of_the_tenant_may_be_learned_from(http, plane):
    source = await played(plane, 1.0)
    job = await made(http, config=learning(source, min_reward=0.5))
    assert job["config"]["algorithm"] == {"name": "sft", "from_run": source, "min_reward": 0.5}
    again = await http.post(f"/jobs/{job['job_id']}/resubmit")
    assert (again.status_code, again.json()["config"]) == (201, job["config"])


@pytest.mark.parametrize("kind", ["training", "inference"])
@pytest.mark.parametrize(
    "place", ["/etc", "/", "runs/x", "..", ".", "", "job-0000000000000000/run", "../job-0000000000000000", ["job"], 3]
)
async def test_a_tenant_names_no_folder_of_the_server(http, kind, place):
    told = await refused(http, 422, kind=kind, config=learning(place))
    assert "the server reads no folder for it; name the ID of a job" in told


async def test_a_job_that_names_the_folder_of_a_job_is_refused(http, plane):
    source = await played(plane, 1.0)
    folder = plane.scheduler.folder_of(source) / RUN
    assert (folder / "run.db").is_file()
    assert "reads no folder" in await refused(http, 422, config=learning(str(folder)))


async def test_episodes_of_another_tenant_are_as_those_of_a_job_that_does_not_exist(http, plane):
    source, none = await played(plane, 1.0, tenant="other"), "job-0000000000000000"
    hidden, missing = [(await refused(http, 404, config=learning(job_id))) for job_id in (source, none)]
    assert hidden.replace(source, "") == missing.replace(none, "")


async def test_a_job_without_an_episode_teaches_nothing(http, plane):
    nothing = await played(plane)
    queued = await trained(plane)
    for source in (nothing, queued):
        told = await refused(http, 404, config=learning(source))
        assert told == f"job {source} has no completed training episode to learn from yet"


async def test_a_job_that_serves_what_was_learned_reads_no_episodes(http, plane):
    job = await submit(plane.store, "default", "ann", config=learning(await played(plane, 1.0)))
    fill = lambda path: (path / "weights.txt").write_text("w")  # noqa: E731
    checkpoint.write(plane.scheduler.folder_of(job.job_id) / RUN / "checkpoints", 1, fill, {"step": 1}, keep=9)
    served = await made(http, from_job=job.job_id)
    assert "algorithm" not in served["config"]


async def test_a_service_calls_no_server_that_a_tenant_names(http):
    """Neither from inside of its network nor with a variable of its environment as the key."""
    server = {"url": "http://169.254.169.254", "key_variable": "PALESTRA_KEY"}
    told = await refused(http, 422, config={"algorithm": {"name": "distill", "teacher_server": server}})
    assert "config.algorithm.teacher_server names a server, and this one calls no other for its users" in told


TWO = {
    "policies": {"white": {"model": "tiny-random"}, "black": {"model": "tiny-random"}},
    "roles": {"opponent": "black"},
    "environment": {"name": "gomoku-duel"},
}


def of_black(**algorithm) -> dict:
    return TWO | {"policies": TWO["policies"] | {"black": {"model": "tiny-random", "algorithm": algorithm}}}


async def test_a_job_that_trains_several_policies_is_taken(http):
    job = await made(http, config=of_black(name="ppo", clip_low=0.1))
    assert job["config"]["policies"]["black"]["algorithm"]["clip_low"] == 0.1


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            {"name": "sft", "from_run": "/etc"},
            "config.policies.black.algorithm.from_run is taken from [algorithm] only",
        ),
        (
            {"name": "distill", "teacher_server": {"url": "http://a"}},
            "config.policies.black.algorithm.teacher_server n",
        ),
        ({"kl": {"reference": "/etc"}}, "the model is '/etc'"),
        ({"name": "os.path:join"}, "a class of your own"),
        ({"epochs": 65}, "policies.black.algorithm.epochs is 65, and this service allows at most 64"),
    ],
)
async def test_the_algorithm_of_one_policy_is_held_to_the_rules_of_the_jobs(http, algorithm, said):
    answer = await http.post("/jobs", json={"config": of_black(**algorithm)})
    assert answer.status_code in (400, 422), answer.text
    assert said in answer.json()["error"]["message"]


def saved(plane, job_id: str, **steps: Sequence[int]) -> None:
    """Checkpoints of these steps, by policy."""
    for policy, numbers in steps.items():
        for step in numbers:
            fill = lambda path, policy=policy: (path / "weights.txt").write_text(policy)  # noqa: E731
            folder = plane.scheduler.folder_of(job_id) / RUN / "checkpoints" / policy
            checkpoint.write(folder, step, fill, {"step": step}, keep=9)


async def test_each_of_several_policies_starts_from_the_one_of_its_name(http, plane):
    job = await submit(plane.store, "default", "ann", name="duel", config=TWO)
    saved(plane, job.job_id, white=[2, 4, 6], black=[2, 4])
    served = await made(http, from_job=job.job_id)
    assert (served["kind"], served["from_step"]) == ("inference", 4), "the newest that both have"
    assert served["config"]["policies"].keys() == {"white", "black"}
    again = await made(http, from_job=job.job_id, from_step=2, kind="training")
    assert (again["kind"], again["from_step"]) == ("training", 2)
    assert "it has those of 2, 4" in await refused(http, 404, from_job=job.job_id, from_step=6)
    alone = await made(http, from_job=job.job_id, config={"policies": {"white": {}}})
    assert alone["from_step"] == 6, "its own newest"
    told = await refused(http, 400, from_job=job.job_id, config={"policies": {"green": {}}})
    assert "from_job trains 'white' and 'black'" in told
    assert "rename 'green'" in told


@pytest.mark.slow
async def test_a_job_that_trains_nothing_has_no_weights_to_start_from(http, plane):
    config = {"kind": "inference", "policies": {"a": {"model": "tiny-random", "frozen": True}}}
    job = await submit(plane.store, "default", "ann", name="serve", config=config)
    told = await refused(http, 400, from_job=job.job_id, config={"policies": {"white": {}}})
    assert "trains nothing" in told
