from __future__ import annotations

import json
import tomllib

import pytest

from palestra.config import JobConfig, parse_config
from palestra.learner.open_run import OpenRun
from palestra.learner.reporting import RunFolder, StepLog
from palestra.types.progress import JobProgress
from unit.building import open_store


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "deep" / "run")


def lines(folder) -> list[str]:
    return (folder.path / "metrics.jsonl").read_text().splitlines()


def test_the_folder_is_made_and_has_its_places(folder):
    assert folder.path.is_dir()
    assert (folder.store.name, (folder.path / "checkpoints").name) == ("run.db", "checkpoints")


def test_the_configuration_can_be_read_again(folder):
    config = JobConfig(name="x", steps=3)
    folder.write_config(config)
    assert parse_config(tomllib.loads((folder.path / "config.toml").read_text())) == config


def test_metrics_are_one_row_a_line_whole_numbers_without_a_point(folder):
    folder.append_metrics({"step": 1.0, "train/reward_mean": 0.1})
    folder.append_metrics({"step": 2.0, "big": 1e20})
    assert lines(folder)[0] == '{"step": 1, "train/reward_mean": 0.1}'
    assert [json.loads(line) for line in lines(folder)] == [
        {"step": 1, "train/reward_mean": 0.1},
        {"step": 2, "big": 10**20},
    ]


def test_a_restart_writes_the_rows_anew(folder):
    folder.append_metrics({"step": 1.0})
    folder.append_metrics({"step": 2.0})
    folder.write_metrics([{"step": 1.0}])
    folder.append_metrics({"step": 2.0, "x": 0.5})
    assert lines(folder) == ['{"step": 1}', '{"step": 2, "x": 0.5}']
    assert sorted(p.name for p in folder.path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0.0, "validation/reward_mean": 0.2}],
        [{"step": float(s), "train/reward_mean": s / 9, "validation/reward_mean": s / 8} for s in range(9)],
    ],
)
def test_a_curve_is_drawn_of_whatever_there_is(folder, rows):
    folder.draw_curve(rows, "job")
    assert (folder.path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(p.name for p in folder.path.iterdir()) == ["curve.png"]


@pytest.mark.parametrize("validation", [0.80, 0.81, 0.78, 0.2])
def test_the_numbers_at_the_ends_of_the_curves_can_be_read(folder, monkeypatch, validation):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, _: drawn.append(figure))
    rows = [{"step": 0.0, "train/reward_mean": 0.0, "validation/reward_mean": 0.2}]
    folder.draw_curve([*rows, {"step": 1.0, "train/reward_mean": 0.8, "validation/reward_mean": validation}], "job")
    drawn[0].canvas.draw()
    one, other = (text.get_window_extent() for text in drawn[0].axes[0].texts)
    assert not one.overlaps(other)


async def test_numbers_that_json_does_not_have_are_left_out_of_the_row_everywhere(folder):
    with open_store(folder.path) as store:
        progress = JobProgress(job="x", steps=2, run_dir=folder.path)

        def report(kind, data):
            assert None not in data.values()

        log = StepLog(
            OpenRun(
                config=JobConfig(),
                store=store,
                engine=None,
                policies=None,
                folder=folder,
                progress=progress,
                report=report,
            )
        )
        await log.restore([{"step": 1.0, "train/loss": None}])  # as a store of before has it
        await log.write(2, {"step": 2.0, "train/a": float("inf"), "train/b": float("nan"), "train/c": 1e308}, False)
        assert lines(folder) == ['{"step": 1}', '{"step": 2, "train/c": ' + str(int(1e308)) + "}"]
        assert await store.log.metrics() == [{"step": 2.0, "train/c": 1e308}] == [progress.last_metrics]
