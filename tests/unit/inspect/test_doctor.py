"""What `palestra doctor` prints."""

from __future__ import annotations

import pytest

from palestra.cli.main import main
from palestra.doctor import examination
from palestra.types.summaries import Examination, Finding


@pytest.mark.parametrize(
    ("policy", "line"), [("b", "equal_rewards  policy b  since step 3"), ("", "equal_rewards  since step 3")]
)
def test_a_finding_is_named_with_its_policy(policy, line, monkeypatch, capsys):
    finding = Finding(
        code="equal_rewards",
        seen="all are equal",
        since=3,
        until=9,
        holds=True,
        steps=7,
        means="nothing is learned",
        remedy="harder tasks",
        policy=policy,
    )
    monkeypatch.setattr(examination, "examine", lambda folder: Examination(step=9, steps=10, findings=(finding,)))
    assert main(["doctor", "runs/duel"]) == 1
    assert line in capsys.readouterr().out.splitlines()
