"""The service as its users meet it: submit, watch, work, cancel; several tenants; and what survives which death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator

import openai
import psutil
import pytest
from servers import HERE, PALESTRA, Process
from service import GAMES, LONG, Service, metrics_of, until

from palestra import SeatEnvironment, read_episodes
from palestra.errors import ConfigError, Forbidden, InvalidRequest, JobOver, NotFound, Unauthorized
from palestra_service.commands.submit import describe

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service")) as service:
        yield service.start()


def running(job) -> bool:
    view = job.view()
    assert view.state in ("queued", "starting", "running"), view
    return view.state == "running"


def test_a_job_is_submitted_watched_and_leaves_a_model(service, tmp_path):
    control = service.client()
    job = control.submit(GAMES, name="lake")
    events = list(job.events())
    states = [event.data["state"] for event in events if event.kind == "state"]
    assert states == ["queued", "starting", "running", "completed"]
    assert [event.data["step"] for event in events if event.kind == "step"] == [0, 1, 2, 3]
    times = [event.data["at"] for event in events]
    assert times == sorted(times)
    assert "step 3/3" in "".join(job.logs())
    assert [change.following for change in job.changes()] == states
    paths = [artifact.path for artifact in job.artifacts()]
    assert "metrics.jsonl" in paths
    assert "checkpoints/step-000003/weights.txt" in paths
    assert not {"api_key", "secret"} & set(paths)
    job.download("curve.png", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    for path in ("api_key", "../log.txt", "run.db", "checkpoints/../secret", "%2e%2e/log.txt"):
        with pytest.raises(NotFound):
            job.download(path, tmp_path / "none")
    assert service.processes_of(job.job_id) == []


def test_the_commands_do_the_same(service, tmp_path):
    config = tmp_path / "job.toml"
    config.write_text(
        'name = "typed"\nsteps = 2\n[engine]\nkind = "fake"\nreply_tokens = 3\n'
        '[environment]\nname = "gomoku"\n[rollout]\ngroup_size = 2\ngroups_per_step = 2\n'
    )
    done = service.command("submit", config, "--watch")
    assert done.returncode == 0, done.stderr
    job_id, *lines = done.stdout.splitlines()
    assert lines[0] == "queued: submitted"
    assert any(line.startswith("step    2") for line in lines)
    assert lines[-1] == "completed: its steps are done"
    table = service.command("jobs").stdout
    assert any(line.startswith(job_id) and "typed" in line and "completed" in line for line in table.splitlines())
    assert "step 2/2" in service.command("logs", job_id).stdout
    exported = service.command("export", job_id, tmp_path / "model")
    assert exported.stdout.endswith("model: the model after step 2, which validated best\n"), exported.stderr
    assert (tmp_path / "model" / "weights.txt").exists()
    assert service.command("cancel", job_id).stdout == f"{job_id}: completed\n"
    for words, said in (
        (("cancel", "job-0000000000000000"), "no job"),
        (("submit", tmp_path / "none.toml"), "no such file"),
        (("submit", config, "--gpus", "7"), "could never start"),
        (("jobs", "--state", "sleeping"), "state"),
    ):
        wrong = service.command(*words)
        assert wrong.returncode == 2, (words, wrong.stdout)
        assert said in wrong.stderr, (words, wrong.stderr)
        assert "Traceback" not in wrong.stderr
    assert "key" in service.command("jobs", key="pk_wrong").stderr


def test_a_job_with_workers_outside_is_played_by_them(service, tmp_path):
    config = {
        "steps": 2,
        "engine": {"kind": "fake", "reply_tokens": 8},
        "rollout": {"group_size": 2, "groups_per_step": 2},
    }
    job = service.client().submit(config)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"text": "a"}\n{"text": "b"}\n')
    rollout = f"{HERE / 'fleet_rollouts.py'}:rollout"
    worker = service.command("worker", rollout, "--job", job.job_id, "--tasks", tasks, "--concurrency", 4)
    assert worker.returncode == 0, worker.stderr
    assert job.wait().state == "completed"


def test_a_role_of_a_job_is_played_by_another_job_and_trained_there(service, tmp_path, monkeypatch):
    control = service.client()
    config = {
        "steps": 2,
        "engine": {"kind": "fake", "reply_tokens": 8},
        "rollout": {"group_size": 2, "groups_per_step": 2},
        "evaluation": {"every_steps": 0},
    }
    duel = {"environment": {"name": "gomoku-duel"}, "seats": {"roles": ["opponent"], "takeover": "replay"}}
    game, rival = control.submit(config | duel | {"steps": 4}), control.submit(config)
    seat = tmp_path / "seat.py"
    seat.write_text(f"import palestra\nopponent = palestra.SeatEnvironment('opponent', job={game.job_id!r})\n")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"text": "a"}\n')
    worker = service.command("worker", f"{seat}:opponent", "--job", rival.job_id, "--tasks", tasks, "--concurrency", 4)
    assert worker.returncode == 0, worker.stderr
    assert rival.wait().state == "completed"
    game.cancel()
    ours, theirs = (read_episodes(service.state / "jobs" / job.job_id / "run", "train") for job in (game, rival))
    assert len(theirs) == 8
    paid = {one.episode_id: one.rewards["opponent"] for one in ours}
    for one in theirs:
        assert one.rewards == {"opponent": paid.pop(json.loads(one.metadata["info"]["reset"])["episode"])}
    other = control.request("POST", "/tenants", json={"name": "rivals"})["secret"]
    monkeypatch.setenv("PALESTRA_URL", service.url)
    for key, job_id, refused in (
        (other, game.job_id, NotFound),
        (service.key, "job-0000000000000000", NotFound),
        (service.key, rival.job_id, JobOver),
    ):
        monkeypatch.setenv("PALESTRA_KEY", key)
        with pytest.raises(refused):
            asyncio.run(SeatEnvironment("opponent", job=job_id).setup())


def runners_of(service) -> list[psutil.Process]:
    """The processes of jobs on this machine that play an environment."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if "palestra.runtime.runner_fleet" in " ".join(process.info["cmdline"] or ()):
                found.append(process)
    return found


def test_runners_count_as_cores_of_their_job_and_are_replaced(service):
    control = service.client()
    acted = GAMES["environment"] | {"agent": "tools", "agent_settings": {"tools": "calculator"}}
    alone = control.submit(GAMES | {"environment": acted})
    assert alone.wait().state == "completed"
    environment = acted | {"runners": 2}
    engine = {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.1}
    job = control.submit(GAMES | {"environment": environment, "engine": engine})
    assert job.view().resources.cpus == 3.0, "its own core, and one for each runner"
    until(lambda: running(job) and len(runners_of(service)) == 2, "two runners")
    victim = runners_of(service)[0]
    rows = service.state / "jobs" / job.job_id / "run" / "metrics.jsonl"
    until(lambda: rows.exists() and len(metrics_of(service, job.job_id)) > 1, "a step")
    victim.kill()
    assert job.wait().state == "completed"
    assert metrics_of(service, job.job_id) == metrics_of(service, alone.job_id), (
        "the killed one's episodes were played again"
    )
    with contextlib.closing(sqlite3.connect(rows.with_name("run.db"))) as store:
        offered = {tools for (tools,) in store.execute("SELECT tools FROM chats WHERE parent IS NULL")}
    assert [json.loads(tools)[0]["function"]["name"] for tools in offered] == ["calculator"], "the agent's own tool"
    until(lambda: not runners_of(service), "the runners end with the job")
    with pytest.raises(InvalidRequest, match=r"environment\.agent"):
        control.submit(GAMES | {"environment": acted | {"agent": "nobody"}})
    with pytest.raises(InvalidRequest, match="never start"):
        control.submit(GAMES | {"environment": GAMES["environment"] | {"runners": 16}})


@pytest.mark.long
def test_workers_find_a_model_server_that_was_killed_where_it_is_now(service, tmp_path):
    config = {
        "steps": 30,
        "engine": {"kind": "fake", "reply_tokens": 8, "delay_seconds": 0.03},
        "rollout": {"group_size": 2, "groups_per_step": 2, "lease_seconds": 5.0},
        "checkpoint": {"every_steps": 1},
    }
    job = service.client().submit(config)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"text": "a"}\n{"text": "b"}\n')
    settings = {**os.environ, "PALESTRA_URL": service.url, "PALESTRA_KEY": service.key}
    words = ["worker", f"{HERE / 'fleet_rollouts.py'}:rollout", "--job", job.job_id, "--tasks", str(tasks)]
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen([str(PALESTRA), *words], env=settings, stdout=log, stderr=log)
    try:
        until(lambda: running(job), "it runs")
        before = job.server().url
        until(lambda: (service.state / "jobs" / job.job_id / "run" / "checkpoints" / "step-000002").exists(), "step 2")
        (process,) = service.processes_of(job.job_id)
        process.kill()
        until(lambda: job.view().starts == 2 and running(job), "it runs again")
        assert job.server().url != before
        assert job.wait().state == "completed"
        assert worker.wait(30) == 0, (tmp_path / "worker.log").read_text()
    finally:
        worker.kill()
        worker.wait()
    assert [row["step"] for row in metrics_of(service, job.job_id)] == list(range(1, 31))


def test_a_second_job_waits_for_room_with_the_reason_and_starts_when_there_is(service):
    control = service.client()
    first = control.submit(LONG, gpus=2)
    until(lambda: running(first), "the first runs")
    second = control.submit(GAMES, gpus=1)
    waits = until(lambda: view if "waits for" in (view := second.view()).reason else None, "it waits with a reason")
    assert waits.state == "queued"
    assert "GPU" in waits.reason
    small = control.submit(GAMES, cpus=0.5)
    assert small.wait().state == "completed"
    assert second.view().state == "queued"
    first.cancel()
    assert second.wait().state == "completed"
    assert first.wait().state == "cancelled"


def test_a_job_with_a_limit_starts_in_the_gap_that_a_learner_foresees_and_saves_when_its_time_is_over(service):
    control = service.client()
    long = control.submit(LONG, cpus=4.0)
    until(lambda: running(long), "the first one runs")
    large = control.submit(GAMES, cpus=6.0, priority="high")
    until(lambda: "kept for it" in large.view().reason, "the large one waits")
    short = control.submit(LONG, cpus=2.0, time_limit_seconds=8.0)
    until(lambda: running(short), "the estimate of the first one is heard")
    assert large.view().state == "queued"
    over = short.wait()
    assert over.state == "cancelled"
    assert over.reason.startswith("its time limit of 8 s is over; to train further")
    assert any(artifact.path.startswith("checkpoints/") for artifact in short.artifacts())
    assert large.view().state == "queued"
    for job in (long, large):
        job.cancel()
    assert {job.wait().state for job in (long, large)} == {"cancelled"}


def test_cancelling_saves_and_frees_everything(service):
    job = service.client().submit(LONG, gpus=1.0)
    until(lambda: running(job), "it runs")
    until(lambda: any(e.kind == "step" for e in first_events(job, 12)), "it trains")
    assert len(service.processes_of(job.job_id)) == 1
    job.cancel()
    view = job.wait()
    assert (view.state, view.reason) == ("cancelled", "cancelled by admin")
    assert any(artifact.path.startswith("checkpoints/") for artifact in job.artifacts())
    until(lambda: not service.processes_of(job.job_id), "its process is gone")
    until(lambda: free_gpus(service) == 2.0, "its GPU is free")


def first_events(job, count: int) -> list:
    found = []
    for event in job.events():
        found.append(event)
        if len(found) == count:
            break
    return found


def free_gpus(service: Service) -> float:
    return sum(node["free_gpus"] for node in service.client().request("GET", "/cluster")["nodes"])


def test_what_can_not_be_run_is_refused_at_once_with_what_could(service):
    control = service.client()
    with pytest.raises(InvalidRequest, match=r"7.*GPUs.*2"):
        control.submit(GAMES, gpus=7)
    with pytest.raises(InvalidRequest, match="whole ones"):
        control.submit(GAMES, gpus=1.5)
    with pytest.raises((ConfigError, InvalidRequest), match="mean 'steps'"):
        control.submit({"stepz": 3})
    with pytest.raises(InvalidRequest, match="no folder"):
        control.submit({"policies": {"p": {"model": "/etc"}}})
    with pytest.raises(InvalidRequest, match=r"files.*read"):
        control.submit({"tasks": {"train": "/etc/passwd"}})
    with pytest.raises(InvalidRequest, match="mean 'gomoku'"):
        control.submit(GAMES | {"environment": {"name": "gomuku"}})


def test_tenants_users_and_keys_keep_to_themselves(service):
    admin = service.client()
    other = service.client(admin.request("POST", "/tenants", json={"name": "other"})["secret"])
    mine = admin.submit(GAMES)
    mine.wait()
    assert list(other.jobs()) == []
    for ask in (
        other.job(mine.job_id).view,
        other.job(mine.job_id).cancel,
        other.job(mine.job_id).changes,
        other.job(mine.job_id).artifacts,
        other.job(mine.job_id).server,
        lambda: list(other.job(mine.job_id).logs()),
        lambda: list(other.job(mine.job_id).events()),
    ):
        with pytest.raises(NotFound) as hidden:
            ask()
        with pytest.raises(NotFound) as missing:
            other.job("job-0000000000000000").view()
        assert str(hidden.value).replace(mine.job_id, "") == str(missing.value).replace("job-0000000000000000", "")
    member = service.client(admin.request("POST", "/users", json={"name": "eve", "role": "member"})["secret"])
    assert member.job(mine.job_id).view().state == "completed"
    for refused in (lambda: member.request("GET", "/users"), member.job(mine.job_id).cancel):
        with pytest.raises(Forbidden):
            refused()
    key = member.request("POST", "/keys", json={"label": "laptop"})
    assert service.client(key["secret"]).request("GET", "/me")["user"] == "eve"
    member.request("DELETE", f"/keys/{key['key_id']}")
    with pytest.raises(Unauthorized):
        service.client(key["secret"]).request("GET", "/me")
    assert {line["what"] for line in admin.request("GET", "/audit")} >= {"job.submit", "user.add", "tenant.add"}
    logs = "".join(process.output for process in service.processes)
    for secret in (key["secret"], other._http.headers["authorization"].split()[1]):
        assert secret not in logs


def test_an_operator_gives_tenants_quotas_and_an_admin_keys_limits(service):
    def said(*words: str) -> str:
        done = service.command(*words)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    (key,) = re.findall(r"pk_\w{12}_[\w-]{43}", said("tenants", "add", "physics"))
    assert "physics no quota" in said("tenants")
    assert said("tenants", "quota", "physics", "--gpus", "1", "--jobs", "5") == "physics jobs 5, gpus 1"
    assert said("tenants", "quota", "physics", "--jobs", "none") == "physics gpus 1"
    config = {"config": GAMES, "resources": {"gpus": 2}}
    with pytest.raises(InvalidRequest, match=r"physics.*1"):
        service.client(key).request("POST", "/jobs", json=config)
    assert "no quota" in said("tenants", "quota", "physics", "--none")
    made = service.client(key).request("POST", "/jobs", json=config)
    service.client(key).request("DELETE", f"/jobs/{made['job_id']}")
    weak = said("keys", "make", "--limit", "open_jobs=1", "--limit", "episodes_in_flight=7").split()[-1]
    job = service.client(weak).submit(GAMES)
    assert job.wait().config["rollout"] == GAMES["rollout"] | {"max_claimed": 7}
    for words, why in (
        (("tenants", "quota", "physics"), "a quota is set with"),
        (("tenants", "quota", "nobody", "--jobs", "1"), "no tenant nobody"),
        (("tenants", "add"), "which one?"),
        (("keys", "make", "--limit", "jobs=1"), "there is no limit 'jobs'"),
    ):
        done = service.command(*words)
        assert done.returncode == 2
        assert why in done.stderr


def test_a_model_server_that_is_killed_goes_on_from_its_checkpoint_with_the_same_weights(service):
    control = service.client()
    slow = GAMES | {"engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.05}, "steps": 6}
    undisturbed, killed = control.submit(slow), control.submit(slow)
    until(lambda: (service.state / "jobs" / killed.job_id / "run" / "checkpoints" / "step-000002").exists(), "step 2")
    (process,) = service.processes_of(killed.job_id)
    process.kill()
    view = killed.wait()
    assert (view.state, view.starts, view.restarts_left) == ("completed", 2, 2)
    assert [change.following for change in killed.changes()].count("queued") == 2
    assert undisturbed.wait().state == "completed"
    assert metrics_of(service, killed.job_id) == metrics_of(service, undisturbed.job_id)


def test_killing_the_scheduler_leaves_jobs_running_and_a_new_one_finds_them(service):
    job = service.client().submit(LONG, gpus=0.5)
    until(lambda: running(job), "it runs")
    (process,) = service.processes_of(job.job_id)
    service.processes[-1].send(signal.SIGKILL)
    service.processes[-1].wait()
    steps = service.state / "jobs" / job.job_id / "run" / "metrics.jsonl"
    before = until(lambda: steps.exists() and steps.stat().st_size, "it has trained")
    until(lambda: steps.stat().st_size > before, "it trains on without a scheduler")
    old = service.key
    service.options = (*service.options, "--new-admin-key")
    service.start()
    service.options = service.options[:-1]
    assert service.key != old, "one more key, for whoever has lost theirs"
    again = service.client().job(job.job_id)
    assert again.view().state == "running"
    assert service.processes_of(job.job_id) == [process]
    assert free_gpus(service) == 1.5
    waiting = service.client().submit(GAMES, gpus=2)
    until(lambda: "waits" in waiting.view().reason, "what it holds is known")
    again.cancel()
    assert again.wait().state == "cancelled"
    assert waiting.wait().state == "completed"


def test_what_a_job_has_trained_is_served_by_another_until_it_is_cancelled(service):
    control = service.client()
    trained = control.submit(GAMES, name="lake")
    assert trained.wait().state == "completed"
    other = service.client(control.request("POST", "/tenants", json={"name": "stranger"})["secret"])
    with pytest.raises(NotFound, match="no job"):
        other.submit(from_job=trained.job_id)
    job = control.submit(from_job=trained.job_id, from_step=2, gpus=1.0)
    view = job.view()
    assert (view.kind, view.name, view.from_job, view.from_step) == ("inference", "lake", trained.job_id, 2)
    assert said_by(job) is not None
    assert job.view().url == job.wait_for_server().url
    own = service.state / "jobs" / job.job_id / f"{trained.job_id}-step-2" / "weights.txt"
    source = service.state / "jobs" / trained.job_id / "run" / "checkpoints" / "step-000002" / "weights.txt"
    assert own.stat().st_ino == source.stat().st_ino
    source.unlink()  # as the trainer of a job that goes on would
    (process,) = service.processes_of(job.job_id)
    process.kill()
    until(lambda: job.view().starts == 2 and running(job), "it is served again")
    assert "it is started again" in " ".join(change.reason for change in job.changes())
    assert said_by(job) is not None
    assert service.command("jobs").stdout.splitlines()[1].split()[:2] == [job.job_id, "lake"]
    job.cancel()
    assert job.wait().state == "cancelled"
    events = [event.kind for event in job.events() if event.kind != "state"]
    assert events == ["serving", "serving", "served"]
    until(lambda: not service.processes_of(job.job_id), "its process is gone")
    until(lambda: free_gpus(service) == 2.0, "its GPU is free")


def said_by(job) -> str | None:
    """What a model that is served says, to the real client."""
    server = job.wait_for_server()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key) as ai:
        (model,) = ai.models.list().data
        answer = ai.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "hello"}])
    return answer.choices[0].message.content


def test_a_model_is_submitted_to_be_served_by_command(service, tmp_path):
    config = tmp_path / "job.toml"
    config.write_text('name = "typed"\n[engine]\nkind = "fake"\n')
    done = service.command("submit", config, "--kind", "inference")
    assert done.returncode == 0, done.stderr
    job = service.client().job(done.stdout.strip())
    assert said_by(job) is not None
    worker = service.command("worker", f"{HERE / 'fleet_rollouts.py'}:rollout", "--job", job.job_id)
    assert worker.returncode != 0
    assert "serves a model and has no episodes" in worker.stderr + worker.stdout
    assert "is being cancelled" in service.command("cancel", job.job_id).stdout
    watched = [describe(event.kind, event.data, "") for event in job.events()]
    assert "serving SmolLM2-135M-Instruct" in watched
    assert watched[-1].startswith("cancelled")
    for words, said in (
        (("submit",), "name a configuration"),
        (("submit", "--from-job", "job-0000000000000000"), "no job"),
        (("submit", config, "--kind", "inference", "--set", "engine.knd=fake"), "did you mean 'kind'?"),
    ):
        wrong = service.command(*words)
        assert wrong.returncode == 2, (words, wrong.stdout)
        assert said in wrong.stderr, (words, wrong.stderr)


def test_a_drained_cluster_starts_nothing_until_it_is_told_to(service):
    control = service.client()
    control.request("POST", "/cluster/drain", json={"on": True})
    job = control.submit(GAMES)
    until(lambda: "drain" in job.view().reason, "it waits, and says why")
    control.request("POST", "/cluster/drain", json={"on": False})
    assert job.wait().state == "completed"


def test_a_scripted_job_loads_neither_torch_nor_transformers(service):
    job = service.client().submit(LONG, cpus=0.5)
    until(lambda: running(job), "it runs")
    (process,) = service.processes_of(job.job_id)
    loaded = {mapped.path for mapped in process.memory_maps()}
    assert not [path for path in loaded if "/torch/" in path or "/transformers/" in path]
    job.cancel()
    job.wait()


def test_a_second_scheduler_on_the_same_state_is_refused(service, tmp_path):
    command = [sys.executable, "-m", "palestra.cli.main", "serve", "--state-dir", str(service.state), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "in use" in done.stderr or "another" in done.stderr, done.stderr


def test_without_keys_only_loopback_is_served(tmp_path):
    process = Process.start(
        [sys.executable, "-m", "palestra.cli.main", "serve", "--insecure-no-auth", "--host", "0.0.0.0", "--port", "0"],
        tmp_path / "log",
    )
    assert process.wait() == 2
    assert "loopback" in process.output


def test_the_service_ends_with_nothing_left(service):
    """The last of this file: SIGTERM with no job running takes the local cluster along."""
    process = service.processes[-1]
    started = time.monotonic()
    process.send(signal.SIGTERM)
    assert process.wait(30) == 0, process.output
    assert time.monotonic() - started < 30
    assert not (service.state / "ray.json").exists()
