"""A run as an object: what is missing is named, curves have its points, and watching ends with the job."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import palestra
from palestra.client.control import ControlClient
from palestra.client.job import Job, JobEvent
from palestra.errors import InvalidRequest, NotFound
from palestra.store.browsing import browse
from unit.building import FakeClock, open_store
from unit.dashboard.recorded import record


class Display:
    """What IPython shows below a cell, and how often it changed."""

    def __init__(self, monkeypatch) -> None:
        self.changes, module = 0, ModuleType("IPython.display")
        module.display = lambda figure, display_id: self
        monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
        monkeypatch.setitem(sys.modules, "IPython.display", module)

    def update(self, figure) -> None:
        self.changes += 1


def points(figure) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].lines}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(NotFound, match="not the folder of a run"):
        palestra.load_run(tmp_path)


@pytest.mark.parametrize(("wanted", "named"), [(None, "pandas, or polars"), ("pandas", "pandas"), ("polars", "polars")])
async def test_a_missing_library_is_named_and_nothing_is_read(tmp_path, monkeypatch, wanted, named):
    await record(tmp_path)
    monkeypatch.setattr("palestra.notebook.frames.find_spec", lambda name: None)
    run = palestra.load_run(tmp_path, frames=wanted)
    (tmp_path / "run.db").unlink()
    for read in (run.metrics, run.episodes, run.calls, run.tokens):
        with pytest.raises(ModuleNotFoundError, match=f"pip install {named}$"):
            read()


async def test_another_library_is_refused(tmp_path):
    await record(tmp_path)
    with pytest.raises(InvalidRequest, match="'pandas' or 'polars'"):
        palestra.load_run(tmp_path, frames="excel").metrics()


async def test_a_figure_has_the_points_of_the_metrics(tmp_path):
    await record(tmp_path)
    figure = palestra.load_run(tmp_path).draw(["train/reward_mean", "train/own_metric", "no/such"])
    assert points(figure) == {"train/reward_mean": [(4, 0.5), (5, 0.625)], "train/own_metric": [(4, 1.5), (5, 1.5)]}


async def test_findings_are_those_of_the_doctor(tmp_path):
    await record(tmp_path)
    assert palestra.load_run(tmp_path).findings() == []


async def test_watching_a_run_draws_each_step_and_ends_with_the_job(tmp_path, monkeypatch):
    shown = Display(monkeypatch)
    await record(tmp_path)
    assert palestra.load_run(tmp_path).watch(seconds=0) == "completed"
    assert shown.changes == 1
    with open_store(tmp_path, FakeClock()) as store:
        await store.log.add_event("running", {"step": 5})
    looks = []

    def interrupt(seconds: float) -> None:
        looks.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    assert palestra.load_run(tmp_path).watch(seconds=3) == "interrupted"
    assert looks == [3]


async def test_a_watched_job_of_a_service_is_drawn_by_its_steps(monkeypatch):
    shown = Display(monkeypatch)
    job = Job(ControlClient("http://127.0.0.1:1"), "job-1")
    rows = [{"step": step, "train/reward_mean": step / 10} for step in (1, 2, 2)]
    events = [JobEvent("1", "state", {}), *(JobEvent(str(n), "step", row) for n, row in enumerate(rows))]
    monkeypatch.setattr(job, "events", lambda: iter(events))
    monkeypatch.setattr(job, "view", lambda: "over")
    assert job.watch() == "over"
    assert shown.changes == 2  # a row that came twice changes nothing


async def test_without_ipython_watching_names_it(tmp_path, monkeypatch):
    await record(tmp_path)
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(ModuleNotFoundError, match="pip install ipython"):
        palestra.load_run(tmp_path).watch()


async def test_reading_does_not_change_the_run(tmp_path):
    await record(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    run = palestra.load_run(tmp_path)
    run.draw()
    run.findings()
    assert repr(run) == f"load_run({str(tmp_path)!r})"
    assert run.config.name == "recorded"
    with browse(tmp_path / "run.db"):
        pass
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in before} == before
