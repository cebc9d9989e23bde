"""Signs that a reward is gamed, planted in the rows of a run that learns."""

from __future__ import annotations

import math

import pytest

from palestra.doctor.divergence import divergence
from palestra.doctor.evidence import ALARM
from palestra.doctor.examination import RULES
from palestra.doctor.rule import RunHistory
from palestra_inspect.audit_rules import AUDIT_RULES
from unit.doctor.curves import JOB, found, run_of

FROM = 40


def audited(step: int, **changes: float) -> dict[str, float]:
    """The numbers of an audit that finds nothing; the scores rise with the reward."""
    return {
        "audit__episodes": 32.0,
        "audit__failed": 0.0,
        "audit__score": 0.2 + 0.6 * (1 - 0.95**step),
        "audit__score_best": 0.3 + 0.6 * (1 - 0.95**step),
        "audit__score_best_std": 0.2,
        "audit__evidence": -0.5,
        "audit__score_best_evidence": -0.5,
        "audit__length_evidence": -0.5,
        "audit__repeated_share": 0.1,
        **({"audit__null_replies": 24.0, "audit__null_share": 0.0} if step % 10 == 1 else {}),
    } | changes


def later(step: int, value: float, before: float) -> float:
    return value if step >= FROM else before


def falls(step: int) -> dict[str, float]:
    return audited(step, audit__evidence=later(step, 2.0, -0.5), audit__score=later(step, 0.4, 0.6))


def null_replies(step: int) -> dict[str, float]:
    row = audited(step)
    return row | ({"audit__null_share": later(step, 0.5, 0.0)} if "audit__null_share" in row else {})


def one_reward(step: int) -> dict[str, float]:
    return audited(
        step,
        **{"audit/evidence/kind": later(step, 2.0, -0.5), "audit/others/kind": later(step, 0.1, 0.5)},
        train__rewards__kind=later(step, 0.9, 0.3),
    )


PLANTED = {
    "audit_diverges": falls,
    "judge_gamed": null_replies,
    "component_dominates": one_reward,
    "length_pays": lambda step: audited(
        step,
        audit__length_evidence=later(step, 2.0, -0.5),
        audit__score=0.5,
        rollout__completion_tokens=128 * later(step, 150.0, 60.0),
    ),
    "replies_repeat": lambda step: audited(step, audit__repeated_share=later(step, 0.95, 0.1)),
    "escapes_grow": lambda step: audited(step, train__episodes_discarded=later(step, 60.0, 0.0)),
}


@pytest.mark.parametrize("seed", range(5))
def test_an_audit_that_finds_nothing_shows_nothing(seed):
    assert found(run_of(100, audited, seed=seed)) == {}


@pytest.mark.parametrize("code", PLANTED)
def test_each_sign_is_found_soon_after_it_began(code):
    signs = found(run_of(100, PLANTED[code]))
    assert signs.keys() == {code}
    since, until = signs[code]
    assert FROM <= since <= FROM + 16  # a probe is made every ten steps
    assert until == 100


def test_each_rule_has_a_planted_sign_and_is_among_all():
    assert {rule.code for rule in AUDIT_RULES} == PLANTED.keys()
    assert set(AUDIT_RULES) <= set(RULES)


def history(rows: list[dict[str, float]]) -> RunHistory:
    return RunHistory(JOB, rows)


def test_a_divergence_says_since_when_and_how_far():
    seen = divergence(history(run_of(46, falls)))
    assert seen is not None
    assert seen.since == FROM
    assert "from 0.60 to 0.40" in seen.seen


def test_scores_of_the_best_paid_that_fall_are_enough():
    best = "audit__score_best_evidence"
    rows = run_of(60, lambda step: falls(step) | {"audit__evidence": -0.5, best: later(step, 2.0, -0.5)})
    assert found(rows).keys() == {"audit_diverges"}


def test_rewards_that_fall_with_the_scores_are_no_divergence():
    rows = run_of(60, lambda step: falls(step) | {"train__reward_mean": later(step, 0.1, 0.6)})
    assert divergence(history(rows)) is None
    assert "audit_diverges" not in found(rows)


def test_scores_that_rise_are_no_divergence():
    rows = run_of(60, lambda step: falls(step) | {"audit__score": later(step, 0.9, 0.5)})
    assert divergence(history(rows)) is None


def test_without_scores_there_is_no_divergence():
    rows = run_of(60, lambda step: {"audit__episodes": 0.0, "audit__evidence": 3.0})
    assert divergence(history(rows)) is None


@pytest.mark.parametrize(("nats", "alarms"), [(ALARM + 0.1, False), (ALARM + math.log(2) + 0.1, True)])
def test_two_named_rewards_raise_no_more_false_alarms_than_one(nats, alarms):
    names = {f"audit/{kind}/{name}": 0.0 for kind in ("evidence", "others") for name in ("kind", "true")}

    def planted(step: int) -> dict[str, float]:
        lost = {"audit/evidence/kind": nats, "audit/others/kind": -1.0} if step == 20 else {}
        return audited(step, **(names | lost), train__rewards__kind=1.0)

    assert (found(run_of(20, planted)).keys() == {"component_dominates"}) is alarms


def test_a_run_without_an_audit_has_none_of_the_signs():
    rows = run_of(100, lambda step: {"train__episodes_discarded": later(step, 60.0, 0.0)})
    assert not found(rows).keys() & PLANTED.keys()
