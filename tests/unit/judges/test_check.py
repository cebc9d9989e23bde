"""`palestra judge check`: a judge beside labels, itself, and replies that say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge_server import Asked, judging

from palestra.cli.main import main
from palestra_judges.bounds import doubts
from palestra_judges.check import interval, kappa, tau_b

pytestmark = pytest.mark.ci


def test_the_statistics_are_those_of_scipy_and_of_hand():
    stats = pytest.importorskip("scipy.stats")
    first, second = [3, 1, 2, 2, 5, 4], [1, 2, 2, 3, 5, 5]
    assert tau_b(first, second) == pytest.approx(stats.kendalltau(first, second).statistic)
    # 20 yes together, 5 and 10 apart, 15 no together: (0.7 - 0.5) / (1 - 0.5).
    labels = [1] * 20 + [1] * 5 + [0] * 10 + [0] * 15
    found = [1] * 20 + [0] * 5 + [1] * 10 + [0] * 15
    assert kappa(labels, found, 2) == pytest.approx(0.4)
    assert kappa([0, 1, 2, 2], [0, 1, 2, 2], 3) == 1.0
    low, high = interval(50, lambda places: kappa([labels[n] for n in places], [found[n] for n in places], 2))
    assert 0.05 < low < 0.25 < 0.55 < high < 0.75


@pytest.mark.parametrize("labels", [3, 5, 10])
def test_the_interval_of_few_labels_has_the_mean_in_19_of_20_cases(labels):
    draw = np.random.default_rng(7)
    orders = np.round(draw.normal(0.2, 0.3, (200, labels)), 1)
    found = [interval(labels, lambda places, one=one: float(one[list(places)].mean())) for one in orders]
    held = [low <= 0.2 <= high for low, high in found if np.isfinite(low)]
    assert len(held) > 180
    assert np.mean(held) >= 0.9


def test_the_interval_of_a_mean_is_students_and_none_is_claimed_of_equal_values():
    stats = pytest.importorskip("scipy.stats")
    values = np.array([0.1, -0.2, 0.4, 0.0, 0.3, 0.6])
    wanted = stats.t.interval(0.95, 5, values.mean(), stats.sem(values))
    assert interval(6, lambda places: float(values[list(places)].mean())) == pytest.approx(wanted, abs=0.05)
    assert all(np.isnan(end) for end in interval(6, lambda places: 1.0))
    assert all(np.isnan(end) for end in interval(1, lambda places: 0.5))


def written(folder: Path, table: dict[str, Any], labels: list[dict[str, Any]]) -> list[str]:
    """The arguments of a check of these labels."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if key != "criteria"]
    for one in table.get("criteria", ()):
        lines += ["[[judge.criteria]]", *(f"{key} = {json.dumps(value)}" for key, value in one.items())]
    (folder / "job.toml").write_text("[judge]\n" + "\n".join(lines) + "\n")
    (folder / "labels.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    return ["judge", "check", str(folder / "labels.jsonl"), "--config", str(folder / "job.toml")]


RUBRIC = {"kind": "rubric", "model": "m", "criteria": [{"name": "right", "text": "Is it right?"}]}


def sums(count: int) -> list[dict[str, Any]]:
    right = [n % 2 == 0 for n in range(count)]
    return [
        {"question": f"1 + {n}?", "reply": str(n + 1 if good else n), "labels": {"right": "yes" if good else "no"}}
        for n, good in enumerate(right)
    ]


def knows(asked: Asked) -> str:
    question = asked.data["question"]
    number = question.removeprefix("1 + ").removesuffix("?")
    return asked.choose(lambda one: "yes" if number.isdigit() and asked.text == str(int(number) + 1) else "no")


def test_a_judge_that_knows_is_within_the_bounds(tmp_path, capsys):
    with judging(knows) as server:
        arguments = written(tmp_path, RUBRIC | {"url": server.url}, sums(12))
        assert main([*arguments, "--out", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert "agreement            1.00" in said
    assert "below" not in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert doubts(tmp_path / "out.json", found["rubric"], found["judge"]) == []
    assert doubts(tmp_path / "out.json", found["rubric"], "policy m") == []
    assert "another judge" in doubts(tmp_path / "out.json", "other", "m")[0]


def test_a_judge_that_is_asked_again_may_choose_another_answer(tmp_path, capsys):
    with judging(knows) as server:
        main(written(tmp_path, RUBRIC | {"url": server.url}, sums(2)))
    asked = [one.body for one in server.asked if one.data == server.asked[0].data]
    assert [one["temperature"] for one in asked] == [0.0, 0.0, 0.7]  # plain, with the criteria in reverse, and again
    assert asked[0]["seed"] != asked[2]["seed"]


@pytest.mark.usefixtures("asked_once")
def test_a_question_that_fails_is_left_out_and_its_share_is_told(tmp_path, capsys):
    def judge(asked: Asked) -> str:
        return "hm" if asked.data["question"] == "1 + 3?" else knows(asked)

    with judging(judge) as server:
        assert main(written(tmp_path, RUBRIC | {"url": server.url}, sums(12))) == 0
        said = capsys.readouterr().out
        assert main(written(tmp_path, RUBRIC | {"url": server.url}, [sums(4)[3]] * 2)) == 2
    assert "agreement            1.00" in said
    assert "failed questions     15%" in said  # 3 times the label and 6 empty replies, of 60
    assert "a verdict on no label" in capsys.readouterr().err


def test_a_ranking_whose_ties_are_the_judges_own_counts_as_no_agreement(tmp_path, capsys):
    rows = [{"question": f"q{n}", "replies": ["1", "2"], "ranks": [2, 1]} for n in range(4)]
    rows[0]["ranks"] = [1, 1]

    def judge(asked: Asked) -> str:  # by place in half of the questions, so that the mean of both orders is a tie
        by_place = asked.data["question"] in ("q0", "q1", "q2")
        return asked.rank(lambda text: float(text) if text.isdigit() else -9.0, bias=100.0 if by_place else 0.0)

    with judging(judge) as server:
        main(written(tmp_path, {"kind": "relative", "model": "m", "url": server.url}, rows))
    assert "agreement            0.33" in capsys.readouterr().out


def test_a_judge_that_always_says_yes_is_below_them(tmp_path, capsys):
    with judging(lambda asked: asked.choose(lambda one: "yes")) as server:
        assert main(written(tmp_path, RUBRIC | {"url": server.url}, sums(12))) == 1
    said = capsys.readouterr().out
    assert "below the bounds: its agreement with the labels is 0.00, below 0.4" in said
    assert "below the bounds: its share of empty replies that score is 1.00, above 0.05" in said


def test_a_relative_judge_that_prefers_places_is_below_them(tmp_path, capsys):
    rows = [{"question": f"q{n}", "replies": ["1", "2", "3"], "ranks": [3, 2, 1]} for n in range(6)]

    def value(text: str) -> float:
        return float(text) if text.isdigit() else -9.0

    table = {"kind": "relative", "model": "m"}
    with judging(lambda asked: asked.rank(value)) as server:
        assert main(written(tmp_path, table | {"url": server.url}, rows)) == 0
    assert "agreement            1.00 (interval unknown)" in capsys.readouterr().out
    with judging(lambda asked: asked.rank(value, bias=100.0)) as server:
        assert main(written(tmp_path, table | {"url": server.url}, rows)) == 1
    assert "when the order is reversed is 0.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([], "0 labels"),
        (
            [{"question": "q", "reply": "r", "labels": {"wrong": "yes"}}] * 2,
            "`labels` has a choice for each of right",
        ),
        ([{"question": "q", "reply": "r", "labels": {"right": "perhaps"}}] * 2, "'perhaps' is no choice of 'right'"),
        ([{"question": "q", "labels": {"right": "yes"}}] * 2, "line 1: `reply` is not a text"),
    ],
)
def test_labels_that_do_not_match_are_one_line(tmp_path, capsys, labels, said):
    arguments = written(tmp_path, RUBRIC | {"url": "http://127.0.0.1:9"}, labels)
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.strip().splitlines()) == 1
