from __future__ import annotations

import shutil

import pytest

from palestra.disk import writing
from palestra.errors import ConfigError
from palestra.extensions import load_function
from palestra_lab.comparison import one_run
from palestra_lab.comparison.execution import check_records
from palestra_lab.comparison.one_run import FAILED, STARTED, read_record, run_recorded, write_record
from palestra_lab.comparison.page import curve_of
from palestra_lab.comparison.results import Point, read_results, result_of
from unit.runtime.comparison.grids import finish, planned, rows


def test_tokens_and_seconds_are_those_before_a_validation():
    found = result_of(3, rows((0, 0.1), (50, None), (110, 0.4), (160, 0.3)))
    assert found.points == (Point(0.0, 0.0, 0.1), Point(110, 4.0, 0.4), Point(160, 6.0, 0.3))
    assert (found.final, found.best, found.tokens, found.seconds) == (0.3, 0.4, 160, 6.0)


def test_the_threshold_is_reached_with_the_first_validation_that_has_it():
    found = result_of(0, rows((0, 0.1), (110, 0.4), (160, 0.6), (210, 0.4)))
    assert found.first_at(0.4) == Point(110, 2.0, 0.4)
    assert found.first_at(0.41) == Point(160, 4.0, 0.6)
    assert found.first_at(0.7) is None


def test_between_two_validations_the_reward_is_on_a_line_and_after_the_last_it_is_unknown():
    found = result_of(0, rows((0, 0.0), (100, 0.5), (300, 0.1)))
    assert [found.at(tokens) for tokens in (0, 50, 100, 200, 300, 301)] == pytest.approx([0, 0.25, 0.5, 0.3, 0.1, None])


def test_a_curve_is_the_mean_at_equal_tokens_and_ends_where_a_seed_ends():
    first, second = result_of(0, rows((0, 0.0), (100, 1.0), (200, 1.0))), result_of(1, rows((0, 0.0), (150, 0.6)))
    curve = curve_of([first, second], 200, 4)
    assert curve.tokens == (0, 50, 100, 150)
    assert [reward.mean for reward in curve.rewards] == pytest.approx([0.0, 0.35, 0.7, 0.8])
    assert curve.rewards[1].half == pytest.approx(12.7062 * 0.15, abs=1e-4)  # t of 1 degree, half the range


def test_only_finished_runs_count_and_failures_have_their_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1), (400, 0.4)))
    finish(runs[1], rows((0, 0.1)), state=STARTED)
    finish(runs[2], rows((0, 0.2), (400, 0.5)))
    write_record(runs[3].record, runs[3].settings | {"state": FAILED, "reason": "no memory"})
    found = read_results(runs)
    assert {key: [result.seed for result in of] for key, of in found.finished.items()} == {("sums", "grpo", ""): [1, 3]}
    assert [(failure.run, failure.reason) for failure in found.failures] == [(runs[3], "no memory")]
    assert found.open == 1


def test_a_row_that_is_half_written_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1), (400, 0.4)))
    with (runs[0].folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rollout/sampled_tok')
    assert [result.tokens for result in read_results(runs).finished["sums", "grpo", ""]] == [400]


def test_of_two_validations_after_equally_many_tokens_the_first_counts():
    """A step may sample nothing that counts, such as one of recorded episodes."""
    found = result_of(0, rows((0, 0.1), (0, 0.2), (100, 1.0), (100, 0.5), (200, 0.7)))
    assert [found.at(tokens) for tokens in (0, 50, 100, 150, 200, 201)] == pytest.approx(
        [0.1, 0.6, 1.0, 0.6, 0.7, None]
    )
    assert curve_of([result_of(0, rows((0, 0.1), (0, 0.1)))], 1000, 4).tokens == (0,)


@pytest.mark.parametrize(("unscored", "named"), [(0, "first"), (2, "last")])
def test_a_run_whose_first_or_last_validation_scored_nothing_has_failed(tmp_path, monkeypatch, unscored, named):
    """Otherwise the validation beside it would pass for that of the untrained, or of the final, model."""
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    made = rows((0, 0.1), (200, 0.2), (400, 0.4))
    del made[unscored]["validation/reward_mean"]
    finish(runs[0], made)
    found = read_results(runs[:1])
    assert not found.finished
    assert [failure.reason for failure in found.failures] == [
        f"none of the episodes of its {named} validation was scored"
    ]


def test_a_validation_between_the_others_that_scored_nothing_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    made = rows((0, 0.1), (200, 0.2), (400, 0.4))
    del made[1]["validation/reward_mean"]
    finish(runs[0], made)
    (result,) = read_results(runs[:1]).finished["sums", "grpo", ""]
    assert [point.reward for point in result.points] == [0.1, 0.4]


@pytest.mark.parametrize("line", ["garbage", "[]", "\\xff", '{"step": "1"}', '{"step": null}', ""])
def test_a_line_that_is_no_row_is_named_and_not_left_out(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1), (400, 0.4)))
    with (runs[0].folder / "metrics.jsonl").open("ab") as file:
        file.write(line.encode().replace(b"\\xff", b"\xff") + b"\n{}\n")
    with pytest.raises(ConfigError, match=r"seed-3/metrics\.jsonl:3"):
        read_results(runs)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"{}", b"null", b'"x"', b"\xff\xfe", b'{"state": "finished"}',
             b'{"state": ["x"], "config": {}, "play": null, "arguments": {}}']
)  # fmt: skip
def test_a_record_that_no_run_has_written_is_named(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1)))
    runs[0].record.write_bytes(text)
    for read in (read_results, check_records):
        with pytest.raises(ConfigError, match=r"seed-3\.json.*out/"):
            read(runs)


def test_a_finished_run_whose_folder_was_removed_is_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1)))
    assert read_results(runs).open == 3
    shutil.rmtree(runs[0].folder)
    assert (read_record(runs[0].record), read_results(runs).open) == (None, 4)


def test_a_run_that_could_not_write_says_what_to_do_in_a_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], (), state=STARTED)

    def fails(*_):
        with writing(tmp_path / "x"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(one_run, "_train", fails)
    monkeypatch.setattr(one_run, "_stop_with_parent", lambda: None)
    assert run_recorded(runs[0].record, load_function) == 2
    (failure,) = read_results(runs).failures
    assert failure.reason.endswith("is kept, so mend that and give the same command again")
    monkeypatch.setattr(one_run, "write_whole", fails)
    with pytest.raises(ConfigError, match=r"seed-3\.json.*mend"):
        write_record(runs[0].record, {})
