"""The grid in a service: a real control plane over HTTP, whose jobs end as a test says."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from palestra.cli.main import main
from palestra.errors import ConfigError, ConnectionLost
from palestra.http.server import listen, served, url_of
from palestra_control.control import ControlClient
from palestra_control.wire import ResourcesBody
from palestra_lab.comparison.execution import GridStopped
from palestra_lab.comparison.one_run import read_record, write_record
from palestra_lab.comparison.plan import PlannedRun
from palestra_lab.comparison.results import read_results
from palestra_lab.comparison.submitted import SubmittedGrid, check_not_submitted, check_submittable
from palestra_service.api import create_control_app
from palestra_service.jobs.launcher import Ending
from palestra_service.jobs.scheduler import RUN
from palestra_service.store.control_store import ControlStore
from unit.control.building import control_plane
from unit.control.launching import FakeLauncher
from unit.runtime.comparison.grids import GRID, planned

pytestmark = pytest.mark.ci

METRICS = [
    {"step": 0, "validation/total": 4, "validation/reward_mean": 0.25},
    {
        "step": 1,
        "rollout/sampled_tokens": 400,
        "time/step_seconds": 1.0,
        "validation/total": 4,
        "validation/reward_mean": 0.75,
    },
]


class Plays(FakeLauncher):
    """Every job writes what a finished run has, and ends; those of a name in `fails` fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.fails, self.holds = folder, set(), set()

    async def ended(self, job_id, heard):
        order = self.servers[job_id].order
        run, name = self.folder / "jobs" / job_id / RUN, order.config["name"]
        if name not in self.holds:
            for step in (1, 2):
                (run / f"checkpoints/step-00000{step}").mkdir(parents=True, exist_ok=True)
                (run / f"checkpoints/step-00000{step}/weights").write_text(str(step))
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
            (run / "run.db").write_text("is not fetched")
            self.end(job_id, Ending.FAILED if name in self.fails else Ending.COMPLETED, "no luck")
        return await super().ended(job_id, heard)

    def end(self, job_id, ending, reason=""):
        """A test ends the jobs that it held; one that begins to be watched only then has ended itself."""
        if not self.servers[job_id].over.done():
            super().end(job_id, ending, reason)


@dataclass
class Service:
    url: str = ""
    launcher: Plays | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    clients: list[ControlClient] = field(default_factory=list)

    async def serve(self, folder: Path, stop: asyncio.Event) -> None:
        self.launcher = Plays(folder)
        with ControlStore(f"sqlite:///{folder / 'control.db'}") as store:
            plane = control_plane(store, folder, self.launcher, without_keys=True)
            scheduling = asyncio.ensure_future(plane.scheduler.run())
            listener = listen("127.0.0.1", 0)
            self.url = url_of(listener)
            async with served(create_control_app(plane), listener):
                self.ready.set()
                await stop.wait()
            scheduling.cancel()
            await asyncio.gather(scheduling, return_exceptions=True)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def service(tmp_path) -> Iterator[Service]:
    made, loop, stop = Service(), asyncio.new_event_loop(), asyncio.Event()
    folder = tmp_path / "service"
    folder.mkdir()
    thread = threading.Thread(target=lambda: loop.run_until_complete(made.serve(folder, stop)))
    thread.start()
    assert made.ready.wait(60)
    yield made
    for client in made.clients:
        client.close()
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()


def grid(runs: list[PlannedRun], service: Service, lines: list[str] | None = None, **more) -> SubmittedGrid:
    said = (lambda text: None) if lines is None else lines.append
    arguments = {"checkpoints": "newest", "resources": ResourcesBody(cpus=0.5), "finished": lambda: None} | more
    control = ControlClient(service.url, retry_seconds=2.0)
    service.clients.append(control)
    return SubmittedGrid(runs, control, say=said, poll_seconds=0.05, **arguments)


def jobs(service: Service) -> list:
    with ControlClient(service.url) as control:
        return list(control.jobs())


def test_every_run_is_a_job_and_its_files_are_those_of_a_run_here(tmp_path, service):
    _, runs = planned(tmp_path)
    lines, finished = [], []
    assert grid(runs, service, lines, finished=lambda: finished.append(1)).run() == 0
    assert len(finished) == len(runs) == 4
    made = {job.job_id: job for job in jobs(service)}
    for run in runs:
        record = read_record(run.record)
        job = made[record["job_id"]]
        assert (record["state"], job.state, job.name, job.resources.cpus) == (
            "finished",
            "completed",
            run.config.name,
            0.5,
        )
        assert (job.config["seed"], job.config["token_budget"]) == (run.seed, 400)
        assert job.config["algorithm"]["name"] == "grpo"
        files = sorted(path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file())
        assert files == ["checkpoints/step-000002/weights", "metrics.jsonl"]
    assert len(read_results(runs).finished) == 2
    assert any(line.endswith("validation 0.25 → 0.75 after 400 tokens") for line in lines)
    assert grid(runs, service).run() == 0
    assert len(jobs(service)) == 4, "nothing is run a second time"


@pytest.mark.slow
def test_a_run_that_failed_is_said_and_tried_again_next_time(tmp_path, service):
    _, runs = planned(tmp_path)
    service.launcher.fails = {"sums-flat"}
    lines: list[str] = []
    assert grid(runs, service, lines).run() == 2
    assert any("failed: job job-" in line and "no luck" in line for line in lines)
    assert [failure.run.algorithm for failure in read_results(runs).failures] == ["flat", "flat"]
    service.launcher.fails = set()
    assert grid(runs, service).run() == 0
    assert len(jobs(service)) == 6


def test_a_command_that_was_killed_follows_the_jobs_that_it_had_submitted(tmp_path, service):
    """Before, between and after the submission and its record."""
    _, runs = planned(tmp_path)
    service.launcher.holds = {run.config.name for run in runs}

    class Killed(Exception):
        pass

    first = grid(runs, service)
    submit = first._submit

    def dies(run, request):
        job = submit(run, request)
        if run is runs[2]:
            raise Killed  # the job exists, and no record knows its id
        return job

    first._submit = dies
    with pytest.raises(Killed):
        first.run()
    assert len(jobs(service)) == 3
    known = [(read_record(run.record) or {}).get("job_id") for run in runs]
    assert [name is not None for name in known] == [True, True, False, False]
    service.launcher.holds = set()
    for job_id, server in list(service.launcher.servers.items()):
        run = service.launcher.folder / "jobs" / job_id / RUN
        run.mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
        server.over.get_loop().call_soon_threadsafe(service.launcher.end, job_id, Ending.COMPLETED)
    assert grid(runs, service).run() == 0
    assert len(jobs(service)) == 4, "no run is two jobs"
    assert [read_record(run.record)["job_id"] for run in runs[:2]] == known[:2]


def test_a_signal_leaves_the_jobs_running(tmp_path, service, monkeypatch):
    _, runs = planned(tmp_path)
    service.launcher.holds = {run.config.name for run in runs}
    stopped = grid(runs, service)
    looks = iter(range(100))

    def look(run):
        if next(looks) == 5:
            signal.raise_signal(signal.SIGTERM)
        return SubmittedGrid._look(stopped, run)

    stopped._look = look
    with pytest.raises(GridStopped):
        stopped.run()
    assert {job.state for job in jobs(service)} <= {"queued", "starting", "running"}
    with pytest.raises(ConfigError, match=r"job-\w+.*http://127.0.0.1:\d+.*--control"):
        check_not_submitted(runs)


def test_a_run_that_the_service_refuses_is_a_failure_with_its_reason(tmp_path, service):
    _, runs = planned(
        tmp_path, GRID.replace("[algorithms.grpo]", "[algorithms.grpo]\noverrides.rollout.max_open_buckets = 99999")
    )
    assert grid(runs, service).run() == 2
    assert "this service allows at most" in read_results(runs).failures[0].reason


@pytest.mark.slow
def test_a_control_plane_that_is_gone_ends_the_command_and_nothing_is_lost(tmp_path, service):
    _, runs = planned(tmp_path)
    gone = Service(url="http://127.0.0.1:9")
    with pytest.raises(ConnectionLost):
        grid(runs, gone).run()
    gone.clients[0].close()
    runs[0].record.unlink()
    assert grid(runs, service).run() == 0


def test_what_a_service_can_not_run_is_refused_before_anything_is_submitted(tmp_path):
    (tmp_path / "recipe.py").write_text(
        "def scenario():\n"
        "    return {'config': {'environment': {'name': 'arithmetic'}}, 'tasks': [{}], 'validation_tasks': [{}]}\n"
    )
    (tmp_path / "said.jsonl").write_text('{"prompt": "?"}')
    files = f"{GRID}[scenarios.sums.overrides.tasks]\ntrain = '{tmp_path}/said.jsonl'\n"
    for text, said in (
        (
            GRID.replace('job = "job.toml"', 'play = "recipe.py:scenario"'),
            "recipe.py:scenario is a function of this machine",
        ),
        (files, "its tasks are files of this machine"),
    ):
        _, runs = planned(tmp_path, text)
        with pytest.raises(ConfigError, match=rf"service: .*{said}"):
            check_submittable(runs, "http://127.0.0.1:7400")


def test_what_was_begun_here_or_elsewhere_stays_there(tmp_path):
    _, runs = planned(tmp_path)
    runs[0].record.parent.mkdir(parents=True)
    write_record(runs[0].record, runs[0].settings | {"state": "started"})
    with pytest.raises(ConfigError, match=r"begun.*--control"):
        check_submittable(runs, "http://a:1")
    origin = {"control": "http://b:1", "request": "r", "job_id": "job-1"}
    write_record(runs[0].record, runs[0].settings | {"state": "started"} | origin)
    with pytest.raises(ConfigError, match="http://b:1"):
        check_submittable(runs, "http://a:1")
    check_submittable(runs, "http://b:1")


@pytest.mark.slow
def test_the_command(tmp_path, service, capsys):
    planned(tmp_path)
    assert main(["compare", "compare.toml", "--gpus", "1"]) == 2
    assert "--gpus is of the jobs of a service; add --control URL" in capsys.readouterr().err
    assert main(["compare", "compare.toml", "--control", service.url, "--cpus", "0.5"]) == 0
    out = capsys.readouterr().out
    assert any(f"is {state}" in out for state in ("queued", "starting", "running"))
    assert "4 of 4 runs are finished" in (tmp_path / "out/comparison.md").read_text()
