"""The gate's decisions: what each stage asks, what a person may change, and that any prefix can be replayed."""

from __future__ import annotations

import random

import msgspec
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.errors import ConfigError
from palestra_live.gate.config import GateBounds, GateConfig, why_unreachable
from palestra_live.gate.machine import Gate
from palestra_live.gate.records import (
    Audited,
    Compared,
    HeldOut,
    Observation,
    Offered,
    Ordered,
    SessionEnded,
)
from palestra_live.gate.records import (
    VersionStage as Stage,
)
from palestra_live.gate.routing import canary_user
from unit.live.stories import gate_of, in_canary, in_shadow, passing, serves, started, use


def _order(order, version=None):
    return Ordered(order=order, by="ada", reason="as we agreed", version=version)


def _promoted(better=0.9, **bounds):
    gate = in_canary(canary=0.5, **bounds)
    for _ in use(gate, {0: 0.4, 1: better}, 2_000):
        if gate.live == 1:
            return gate
    raise AssertionError("not promoted")


def test_the_first_version_serves_from_the_beginning():
    gate = gate_of(started())
    assert (gate.live, gate.stages) == (0, {0: Stage.LIVE})
    assert serves(gate, "anyone") == 0


def test_a_better_version_goes_through_all_stages_and_serves_everyone():
    gate, stages = Gate(), []
    for one in (started(shadow=True, canary=0.5), *passing(1)):
        stages += [decision.after for decision in gate.see(one) if decision.version == 1]
    in_shadow(gate, 1, [1.0, 0.0] * 100)
    assert gate.stages[1] is Stage.CANARY
    for _, decisions in use(gate, {0: 0.4, 1: 0.9}, 1_000):
        stages += [decision.after for decision in decisions if decision.version == 1]
    assert stages == [Stage.CANDIDATE, Stage.SHADOW, Stage.LIVE]
    assert gate.stages == {0: Stage.RETIRED, 1: Stage.LIVE}
    assert serves(gate, "anyone") == 1


def test_a_version_that_was_made_worse_is_never_live():
    gate, sessions = in_canary(canary=0.5), 0
    for _, _ in use(gate, {0: 0.7, 1: 0.3}, 1_000):
        assert gate.live == 0
        sessions += 1
        if gate.stages[1] is Stage.REJECTED:
            break
    assert gate.stages[1] is Stage.REJECTED
    assert sessions < 600


def test_held_out_tasks_the_audit_and_the_shadow_each_keep_a_version_from_users():
    worse = gate_of(started(), Offered(version=1), HeldOut(version=1, differences=(-1.0,) * 40))
    assert worse.stages[1] is Stage.REJECTED
    held = gate_of(started(), Offered(version=1), Audited(version=1, passed=False, reason="gamed"))
    assert held.stages[1] is Stage.QUARANTINED
    shadow = gate_of(started(shadow=True), *passing(1))
    in_shadow(shadow, 1, [-1.0, 0.0] * 100)
    assert shadow.stages[1] is Stage.REJECTED


def test_a_candidate_waits_for_both_the_tasks_and_the_audit():
    for half in (HeldOut(version=1, differences=()), Audited(version=1, passed=True)):
        gate = gate_of(started(), Offered(version=1), half)
        assert gate.stages[1] is Stage.CANDIDATE
        assert serves(gate, "anyone") == 0


@pytest.mark.parametrize(
    ("name", "worse", "usual"),
    [
        ("latency", {"seconds": 9.0}, {"seconds": 1.0}),
        ("length", {"tokens": 900}, {"tokens": 100}),
        ("cost", {"cost": 5.0}, {"cost": 1.0}),
        ("refusals", {"refused": True}, {"refused": False}),
        ("errors", {"failed": True}, {"failed": False}),
    ],
)
def test_each_guardrail_rejects_a_version_that_users_like(name, worse, usual):
    gate = in_canary(canary=0.5)
    for number in range(200):
        for version, values in ((1, worse), (0, usual)):
            gate.see(SessionEnded(version=version, user=f"{version}-{number}", score=0.55, **values))
    assert gate.stages[1] is Stage.REJECTED
    same = in_canary(canary=0.5)
    for number in range(200):
        for version in (1, 0):
            same.see(SessionEnded(version=version, user=f"{version}-{number}", score=0.9 if version else 0.1, **worse))
    assert same.stages[1] is Stage.LIVE, f"{name} is the same for both"


def test_a_version_whose_sessions_all_fail_is_rejected_without_any_feedback():
    gate = in_canary(canary=0.5)
    for number in range(100):
        for version in (1, 0):
            gate.see(SessionEnded(version=version, user=f"{version}-{number}", score=None, failed=version == 1))
    assert gate.stages[1] is Stage.REJECTED


def test_no_feedback_is_not_a_score_and_one_user_is_one_observation():
    gate = in_canary(canary=0.5)
    for number in range(2_000):
        gate.see(SessionEnded(version=number % 2, user=f"{number}", score=None))
        gate.see(SessionEnded(version=1, user="fan", score=1.0))
        gate.see(SessionEnded(version=0, user="critic", score=0.0))
    assert gate.trial is not None
    assert gate.trial.canary["score"].differences.size == 1
    assert gate.stages[1] is Stage.CANARY


def test_an_undecided_version_is_rejected_when_its_pairs_are_used_up():
    gate = in_canary(canary=0.5, pairs=60)
    for number in range(100):
        for version in (1, 0):
            gate.see(SessionEnded(version=version, user=f"{version}-{number}", score=float(number % 2)))
    assert gate.stages[1] is Stage.REJECTED
    assert gate.live == 0


def test_a_promoted_version_that_loses_goes_back_by_itself():
    gate = _promoted()
    for sessions, (_, decisions) in enumerate(use(gate, {0: 0.4, 1: 0.1}, 2_000, seed=5)):
        if decisions:
            assert [(one.version, one.after) for one in decisions] == [
                (1, Stage.GONE_BACK),
                (0, Stage.LIVE),
            ]
            assert sessions < 200
            break
    assert gate.live == 0
    # It has not passed any more, and nobody can make it serve.
    with pytest.raises(ConfigError, match=r"1.*not passed"):
        gate.see(_order("promote", 1))


def test_going_back_ends_the_trial_of_the_next_version():
    gate = _promoted()
    for one in passing(2):
        gate.see(one)
    assert gate.stages[2] is Stage.CANARY
    gate.see(_order("back"))
    assert gate.stages == {0: Stage.LIVE, 1: Stage.GONE_BACK, 2: Stage.REJECTED}
    assert serves(gate, "anyone") == 0


def test_an_audit_that_finds_the_live_version_gamed_sends_it_back():
    gate = _promoted()
    gate.see(Audited(version=1, passed=False, reason="the judge is gamed"))
    assert gate.stages == {0: Stage.LIVE, 1: Stage.GONE_BACK}


def test_a_hold_keeps_a_winner_from_serving_until_somebody_promotes_it():
    gate = in_canary(canary=0.5)
    gate.see(_order("hold"))
    for _ in use(gate, {0: 0.2, 1: 0.9}, 500):
        pass
    assert gate.live == 0
    gate.see(_order("promote", 1))
    assert gate.live == 1
    assert gate.held is not None  # the next one waits as well


def test_resuming_promotes_a_winner_at_once():
    gate = in_canary(canary=0.5)
    gate.see(_order("hold"))
    for _ in use(gate, {0: 0.2, 1: 0.9}, 500):
        pass
    gate.see(_order("resume"))
    assert (gate.live, gate.held) == (1, None)


@pytest.mark.parametrize("version", [1, 2, 7, None])
def test_nobody_can_promote_what_has_not_passed(version):
    gate = gate_of(started(canary=0.5), *passing(1))
    if version == 2:
        gate = gate_of(started(shadow=True), *passing(2))
    with pytest.raises(ConfigError, match=r"has not passed|there is no version"):
        gate.see(_order("promote", version))
    assert gate.live == 0


def test_the_first_version_cannot_go_back():
    with pytest.raises(ConfigError, match=r"first.*live"):
        gate_of(started(), _order("back"))


def test_a_version_that_was_live_may_serve_again():
    gate = _promoted()
    gate.see(_order("promote", 0))
    assert gate.stages == {0: Stage.LIVE, 1: Stage.RETIRED}
    gate.see(_order("back"))
    assert gate.stages == {0: Stage.GONE_BACK, 1: Stage.LIVE}


def test_a_margin_that_cannot_be_shown_is_refused_with_what_it_takes():
    with pytest.raises(ConfigError, match=r"takes up to [\d,]+ pairs to show, or [\d,]+ sessions"):
        GateBounds(shadow=True, drop=0.0005)
    assert why_unreachable(GateConfig(margin=0.3), 0.6) is None
    assert "cannot" not in str(why_unreachable(GateConfig(), 0.5))
    assert "no version can be better" in str(why_unreachable(GateConfig(margin=0.3), 0.8))
    needed = str(why_unreachable(GateConfig(margin=0.099), 0.9))
    assert "only after about" in needed
    assert "raise live.gate.pairs" in needed


def test_a_candidate_meets_no_users_where_its_margin_is_out_of_reach():
    gate = gate_of(started(margin=0.3))
    for number in range(50):
        gate.see(SessionEnded(version=0, user=str(number), score=0.9))
    for one in passing(1):
        gate.see(one)
    assert gate.stages[1] is Stage.REJECTED


def test_users_keep_their_version_and_about_the_share_of_them_meets_the_canary():
    gate = in_canary(canary=0.05)
    users = [canary_user(gate.key, f"user {number} ü") for number in range(20_000)]
    chosen = [serves(gate, user) for user in users]
    assert chosen == [serves(gate, user) for user in users]
    assert 0.042 < sum(chosen) / len(chosen) < 0.058
    # Another version meets other users.
    other = in_canary(2, canary=0.05)
    both = sum(serves(other, user) == 2 and version == 1 for user, version in zip(users, chosen, strict=True))
    assert both < 120
    assert canary_user(gate.key, "ada") != "ada"


_OBSERVATIONS = st.integers(0, 2**32).map(lambda seed: _history(random.Random(seed)))


def _history(rng: random.Random) -> list[Observation]:
    """Return a history of some versions, with observations doubled and out of place."""
    found: list[Observation] = [
        started(canary=0.5, shadow=rng.random() < 0.5, pairs=rng.choice([500, 5_000]), drop=0.25)
    ]
    for version in range(1, 4):
        found += passing(version)
        found += [Compared(version=version, against=version - 1, difference=float(rng.random() < 0.8))] * 30
        good = {one: rng.random() for one in range(4)}
        for user in range(150):
            which = rng.choice([version, version - 1, 0])
            found.append(SessionEnded(version=which, user=f"{version}-{user}", score=float(rng.random() < good[which])))
    for _ in range(6):
        found.insert(rng.randrange(1, len(found)), rng.choice(found))
        found.insert(rng.randrange(1, len(found)), _order(rng.choice(["hold", "resume", "back"])))
    return found


def _see(gate: Gate, observation: Observation) -> bytes:
    try:
        return msgspec.json.encode(gate.see(observation))
    except ConfigError as error:
        return str(error).encode()


@given(_OBSERVATIONS, st.floats(0.0, 1.0))
@examples(8, 200)
def test_a_history_that_is_cut_anywhere_and_replayed_decides_the_same(history, cut):
    gate = Gate()
    whole = [_see(gate, one) for one in history]
    kept = msgspec.json.encode(history[: int(cut * len(history))])
    again = Gate()
    for one in msgspec.json.decode(kept, type=list[Observation]):
        _see(again, one)
    assert [_see(again, one) for one in history[int(cut * len(history)) :]] == whole[int(cut * len(history)) :]
    assert (again.live, again.stages, again.before) == (gate.live, gate.stages, gate.before)


@given(_OBSERVATIONS)
@examples(8, 200)
def test_one_version_is_live_at_every_moment_and_it_has_passed(history):
    gate, passed = Gate(), {0}
    for one in history:
        try:
            decisions = gate.see(one)
        except ConfigError:
            decisions = []
        passed |= {
            decision.version
            for decision in decisions
            if decision.before is Stage.CANARY and decision.after is Stage.LIVE
        }
        assert [version for version, stage in gate.stages.items() if stage is Stage.LIVE] == [gate.live]
        assert gate.live in passed
        assert serves(gate, "someone") in {gate.live, *(v for v, s in gate.stages.items() if s is Stage.CANARY)}


def test_bounds_that_another_version_of_palestra_stored_are_read_without_its_other_keys():
    gate = gate_of(started(margin=0.03, worse=0.1))
    assert (gate.live, gate.bounds.margin) == (0, 0.03)
