"""What `palestra live status` says of a version on trial: a score that wins, what blocks it, and the pairs left."""

from __future__ import annotations

import re

import pytest

from palestra_live.gate.command import status
from palestra_live.gate.records import Offered, Ordered, SessionEnded
from palestra_live.gate.records import VersionStage as Stage
from palestra_live.gate.standing import standing
from palestra_live.gate.statistics import FEWEST
from unit.live.stories import gate_of, in_canary, in_shadow, passing, started


def pair(gate, number, scores=(0.0, 1.0), **guarded):
    """One session of each version; `guarded`: a value of the live version, and one of the new."""
    for version in (0, 1):
        values = {name: both[version] for name, both in guarded.items()}
        gate.see(SessionEnded(version=version, user=f"{number}-{version}", score=scores[version], **values))


def test_a_version_that_wins_says_which_guardrail_blocks_it():
    gate = in_canary()
    for number in range(60):
        pair(gate, number, refused=(False, number % 7 == 0), tokens=(10.0, 20.0 if number % 5 else 2.0))
    assert gate.stages[1] is Stage.CANARY
    found = gate.trial.canary
    ratio = (1 + found["length"].differences.mean) / (1 - found["length"].differences.mean)
    assert ratio < 1.5, "the length does not block"
    share = found["refusals"].differences.mean
    assert standing(gate) == f"version 1, canary: wins, but refusals {share:+.3f} > 0.05"
    assert standing(gate) in status(gate, [])


def test_ratios_are_said_as_multiples_and_a_hold_with_its_reason():
    gate = in_canary(guardrails={"length": 1.1})
    for number in range(60):
        tokens = (10.0, 12.0) if number % 2 else (10.0, 11.0)
        pair(gate, number, tokens=tokens)
        if gate.stages[1] is not Stage.CANARY:
            break
    else:
        assert "length 1.15 times > 1.1" in standing(gate)
        gate.see(Ordered(order="hold", by="ann", reason="we look first"))
        assert standing(gate).endswith("> 1.1, promotions are stopped by ann: we look first")
        return
    raise AssertionError(f"decided: {gate.stages}")


def test_an_undecided_version_says_how_many_more_pairs_it_takes_and_so_many_decide_it():
    gate = in_canary(canary=0.5)
    said = standing(gate)
    assert said == f"version 1, canary: {FEWEST} more pairs (about {FEWEST * 2} sessions) before anything is decided"
    number = 0
    while number < 40:
        pair(gate, number, scores=(0.0, float(number % 10 < 6)) if number % 2 else (0.6, 0.3))
        number += 1
    assert gate.stages[1] is Stage.CANARY
    left = int(re.search(r"canary: ([\d,]+) more pairs", standing(gate))[1].replace(",", ""))
    assert "if the difference stays +" in standing(gate)
    for _ in range(left * 2):
        pair(gate, number, scores=(0.0, float(number % 10 < 6)) if number % 2 else (0.6, 0.3))
        number += 1
        if gate.stages[1] is not Stage.CANARY:
            break
    assert gate.stages[1] is Stage.LIVE
    assert number - 40 == pytest.approx(left, rel=0.25), "the estimate is near to what it took"
    assert standing(gate) == ""


def test_versions_that_are_equal_say_when_they_are_rejected():
    gate = in_canary(pairs=100)
    for number in range(30):
        pair(gate, number, scores=(float(number % 2), float(number % 2)))
    assert standing(gate) == (
        "version 1, canary: 70 more pairs (about 1,400 sessions) until it is rejected: "
        "+0.000 is too near to the margin 0"
    )


def test_a_candidate_and_a_shadow_say_what_they_wait_for():
    gate = gate_of(started(shadow=True), Offered(version=1))
    assert standing(gate) == "version 1, candidate: held-out tasks are not scored yet"
    gate = gate_of(started(shadow=True), *passing(1))
    in_shadow(gate, 1, [0.0] * (FEWEST - 5))
    assert standing(gate) == "version 1, shadow: 5 more pairs before anything is decided"
