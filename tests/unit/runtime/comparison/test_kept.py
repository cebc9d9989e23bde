from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra_lab.comparison.kept import KeptResults
from palestra_lab.comparison.results import machine, read_results
from unit.runtime.comparison.grids import GRID, finish, planned, rows


def kept_of(folder, path=None) -> KeptResults:
    return KeptResults(path or folder / "results.json", folder)


def test_results_are_the_same_without_the_runs_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1), (50, None), (110, 0.4), (400, None)))
    finish(runs[2], rows((0, 0.2), (400, 0.5), step_seconds=0.125))
    for run in (runs[0], runs[2]):  # the last step has a validation, as every finished run's
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(rows((0, 0.1), (420, 0.3))[1]) + "\n")
    kept = kept_of(tmp_path)
    before = read_results(runs, kept)
    kept.write()
    shutil.rmtree(tmp_path / "out")
    after = read_results(runs, kept_of(tmp_path))
    assert after == before
    assert before.open == 2
    assert before.machines == (machine(),)
    assert [result.seconds for result in before.finished["sums", "grpo", ""]] == [2.125, 8.0]


def test_a_file_of_another_folder_is_continued_and_has_no_path_of_the_machine(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for number, folder in enumerate((first, second)):
        folder.mkdir()
        monkeypatch.chdir(folder)
        _, runs = planned(folder)
        kept = kept_of(folder, tmp_path / "results.json")
        assert [kept.rows(run) is not None for run in runs[:2]] == [number == 1, False]
        finish(runs[number], rows((0, 0.1), (400, 0.4)))
        assert read_results(runs, kept).done == number + 1
        kept.write()
    assert str(tmp_path) not in (tmp_path / "results.json").read_text()


def test_other_settings_are_refused_by_their_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1), (400, 0.4)))
    kept = kept_of(tmp_path)
    read_results(runs, kept)
    kept.write()
    (tmp_path / "other").mkdir()
    _, other = planned(tmp_path / "other", GRID.replace("[algorithms.grpo]", "[algorithms.grpo]\nclip_low = 0.3"))
    with pytest.raises(ConfigError, match=r"sums/grpo.*config\.algorithm\.clip_low"):
        kept_of(tmp_path / "other", tmp_path / "results.json").rows(other[0])


def test_keys_that_are_newer_than_the_file_have_their_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1), (400, 0.4)))
    kept = kept_of(tmp_path)
    read_results(runs, kept)
    kept.write()
    found = json.loads((tmp_path / "results.json").read_text())
    del found["runs"]["sums/grpo"]["settings"]["config"]["environment"]["max_concurrency"]
    (tmp_path / "results.json").write_text(json.dumps(found))
    assert kept_of(tmp_path).rows(runs[0]) is not None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', '{"format": 1, "runs": {"a/b": {"settings": {}}}}', "\xff"]
)
def test_a_file_without_results_is_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"results.*comparison"):
        kept_of(tmp_path)


def test_a_file_of_a_later_version_is_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"format": 2, "runs": {}}')
    with pytest.raises(ConfigError, match="format 2"):
        kept_of(tmp_path)


def test_the_comparison_of_this_repository_can_be_extended():
    found = json.loads(Path(__file__).parents[4].joinpath("docs", "comparison.json").read_bytes())
    for entry in found["runs"].values():
        JobConfig.model_validate(entry["settings"]["config"])
