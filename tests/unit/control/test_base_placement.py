"""Which base server a job goes to, when one more starts, and when one ends: tables without a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palestra.types.states import BaseState
from palestra_control.jobs import BaseKind, Resources
from palestra_service.placement.bases import BaseLimits, RunningBase, WaitingForBase, part_of_base
from palestra_service.placement.fitting import counted
from palestra_service.placement.placement import PlacementPolicy
from palestra_service.placement.sharing import SERVICE, Cluster, no_room, place_all
from palestra_service.placement.tenants import Quota
from unit.control.placing import job, node, runs

TINY, OTHER = BaseKind("tiny", False), BaseKind("other", False)
ONE_NODE = (node("a"),)
LIMITS = BaseLimits(resources=Resources(cpus=4.0), adapters=4, waiting=10, idle_seconds=60.0)


def asks(job_id, kind=TINY, adapters=1, cpus=0.25, **values) -> WaitingForBase:
    return WaitingForBase(job=job(job_id, cpus=cpus, **values), kind=kind, adapters=adapters)


def base(base_id, kind=TINY, adapters=0, waiting=0, idle=None, where="a", state=BaseState.SERVING, cpus=4.0):
    held = runs(job(base_id, cpus=cpus, tenant=SERVICE), where, starting=state is BaseState.LOADING)
    return RunningBase(
        base_id=base_id,
        kind=kind,
        state=state,
        jobs=adapters,
        adapters=adapters,
        waiting=waiting,
        idle_since=idle,
        held=held,
    )


def decide(shared, bases=(), queue=(), running=(), nodes=ONE_NODE, policy=None, limits=LIMITS, now=100.0):
    return place_all(
        queue, shared, Cluster(nodes=nodes, running=running, bases=bases), policy or PlacementPolicy(), limits, now
    )


@pytest.mark.parametrize(
    ("bases", "wanted"),
    [
        ([base("b1", adapters=1), base("b2", adapters=2)], "b2"),  # the fullest, so that others become idle
        ([base("b1", adapters=1), base("b2", adapters=4)], "b1"),  # the other is full
        ([base("b1", adapters=1), base("b2", adapters=2, waiting=11)], "b1"),  # the other's queue is long
        ([base("b1", adapters=1), base("b2", adapters=2, waiting=10)], "b2"),  # not yet long
        ([base("b1", OTHER, adapters=1), base("b2", idle=1.0)], "b2"),  # another model
        ([base("b1", BaseKind("tiny", True)), base("b2")], "b2"),  # a deterministic one
        ([base("b1", adapters=3, state=BaseState.LOADING), base("b2")], "b2"),
    ],
)
def test_a_job_goes_to_the_fullest_serving_base_of_its_kind_that_has_room(bases, wanted):
    found = decide([asks("j")], bases)
    assert found.bases == {"j": wanted}
    assert [start.job_id for start in found.starts] == ["j"]
    assert (found.new_bases, found.waiting) == ({}, {})


@pytest.mark.parametrize(
    ("bases", "said"),
    [
        ([], "no base server has tiny; one more is started"),
        ([base("b", OTHER)], "no base server has tiny; one more is started"),
        ([base("b", adapters=4)], "no base server of tiny has room for its adapters (4 on each); one more is started"),
        ([base("b", adapters=1, waiting=11)], "over 10 requests wait at each base server of tiny; one more is started"),
    ],
)
def test_where_none_has_room_one_more_starts_and_the_job_says_why_it_waits(bases, said):
    found = decide([asks("j"), asks("k", at=1.0)], bases)
    assert [(kind, start.node_id) for kind, start in found.new_bases.items()] == [(TINY, "a")]
    assert found.waiting == {"j": said, "k": said}
    assert found.starts == ()


def test_jobs_wait_for_the_one_that_loads_until_its_room_is_spoken_for():
    found = decide([asks(f"j{i}", at=float(i)) for i in range(6)], [base("b", state=BaseState.LOADING)])
    waits = "waits for the base server of tiny, which is starting"
    assert [found.waiting[f"j{i}"] for i in range(4)] == [waits] * 4
    assert found.waiting["j4"] == found.waiting["j5"] == "no base server has tiny; one more is started"
    assert list(found.new_bases) == [TINY]


def test_a_base_server_that_finds_no_room_is_waited_for_with_the_reason():
    busy = runs(job("big", cpus=14.0), "a")
    found = decide([asks("j")], running=[busy])
    assert found.waiting == {
        "j": "no base server has tiny; one more waits for 4.25 CPUs: node a has 2 CPUs and 64 GiB free; "
        "node a is kept for it"
    }
    drained = decide([asks("j")], policy=PlacementPolicy(draining=True))
    assert drained.waiting == {"j": "no base server has tiny; one more the cluster is draining, so nothing starts"}


def test_a_job_with_more_adapters_than_any_base_takes_starts_none():
    found = decide([asks("j", adapters=5)])
    assert found.waiting == {"j": "has 5 adapters, and a base server of this service takes 4"}
    assert not found.new_bases


def parted(job_id, adapters=1, limits=LIMITS, **values) -> WaitingForBase:
    """A job that is counted for its tenant with its part of a base server."""
    asking = asks(job_id, adapters=adapters, **values)
    return replace(asking, job=replace(asking.job, beside=part_of_base(limits, adapters)))


def test_a_base_server_is_counted_for_the_tenants_of_its_jobs_by_parts():
    """4 CPUs and a GPU for 4 adapters: each counts 1 CPU and a quarter of the GPU beside the job's own 0.25 CPU."""
    limits = replace(LIMITS, resources=Resources(cpus=4.0, gpus=1.0))
    nodes = (node("a", gpus=1),)
    part = " (with its part of a base server: 0.25 GPU and 1 CPU)"
    jobs = [parted(f"j{i}", limits=limits, at=float(i)) for i in range(4)]
    policy = PlacementPolicy(quotas={"t": Quota(gpus=0.5)}, starts_at_once=9)
    found = decide(jobs, [base("b")], nodes=nodes, policy=policy, limits=limits)
    assert found.bases == {"j0": "b", "j1": "b"}
    assert found.waiting["j2"] == f"quota of tenant t: 0.5 of 0.5 GPUs{part}"
    policy = PlacementPolicy(quotas={"t": Quota(cpus=2.5)}, starts_at_once=9)
    found = decide(jobs, [base("b")], nodes=nodes, policy=policy, limits=limits)
    assert found.bases == {"j0": "b", "j1": "b"}
    none = PlacementPolicy(quotas={"t": Quota(gpus=0.0)})
    found = decide(jobs[:1], [base("b")], nodes=nodes, policy=none, limits=limits)
    assert found.impossible == {"j0": f"needs 0.25 GPU; the quota of tenant t is 0{part}"}
    assert not decide(jobs[:1], nodes=nodes, policy=none, limits=limits).new_bases
    # Neighbours of other tenants change nothing, and what runs counts as what waits.
    assert decide(jobs, [base("b", adapters=2)], nodes=nodes, policy=policy, limits=limits).bases == found_bases(2)
    held = replace(runs(asks("k").job, "a"), beside=part_of_base(limits, 1))
    one = decide(jobs, [base("b", adapters=1)], nodes=nodes, running=[held], policy=policy, limits=limits)
    assert one.bases == found_bases(1)


def found_bases(number: int) -> dict[str, str]:
    return {f"j{i}": "b" for i in range(number)}


@pytest.mark.parametrize("gpus", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("adapters", [1, 3, 16])
def test_the_parts_of_all_places_are_never_more_than_the_base_server(gpus, adapters):
    limits = BaseLimits(resources=Resources(cpus=3.0, gpus=gpus, memory_gib=7.0), adapters=adapters)
    whole = counted(limits.resources)
    parts = [part_of_base(limits, 1)] * adapters
    for kind in range(3):
        assert whole[kind] - adapters < sum(part[kind] for part in parts) <= whole[kind]
    assert part_of_base(limits, adapters) == whole
    assert part_of_base(limits, 0) == (0, 0, 0)


def test_a_base_server_is_placed_where_its_first_job_has_room_beside_it():
    limits = replace(LIMITS, resources=Resources(cpus=4.0))
    tight, wide = node("a", cpus=4.0), node("b", cpus=4.25)
    assert decide([asks("j")], nodes=(tight, wide), limits=limits).new_bases[TINY].node_id == "b"
    # Where no node can hold both, two nodes do.
    apart = decide([asks("j", cpus=2.0)], nodes=(tight, node("c", cpus=2.0)), limits=limits)
    assert apart.new_bases[TINY].node_id == "a"
    there = base("x", where="a", state=BaseState.SERVING)
    assert decide([asks("j", cpus=2.0)], [there], nodes=(tight, node("c", cpus=2.0)), limits=limits).bases == {"j": "x"}
    # The room of the job is kept from others that come with the same decision.
    found = decide([asks("j", at=1.0)], nodes=(wide,), queue=[job("own", cpus=0.25, at=2.0)], limits=limits)
    assert (list(found.new_bases), found.starts) == ([TINY], ())


@pytest.mark.parametrize(
    ("nodes", "cpus", "said"),
    [
        ((node("a", cpus=4.0),), 0.25, "needs 0.25 CPU beside its base server, which holds 4 CPUs; no node has room"),
        ((node("a", cpus=2.0),), 0.25, "needs a base server, which needs 4 CPUs on one node; the largest node has 2"),
        ((node("a", cpus=4.0), node("b", cpus=1.0)), 5.0, "needs 5 CPUs on one node; the largest node has 4"),
    ],
)
def test_a_job_that_could_never_start_beside_a_base_server_is_impossible_and_starts_none(nodes, cpus, said):
    found = decide([asks("j", cpus=cpus)], nodes=nodes)
    assert list(found.impossible) == ["j"]
    assert found.impossible["j"].startswith(said)
    assert (found.new_bases, found.waiting) == ({}, {})
    assert no_room(Resources(cpus=cpus), LIMITS, nodes) == found.impossible["j"]


def test_a_job_that_an_idle_base_server_leaves_no_room_gets_another_in_its_place():
    """It was started under other settings: the node could hold a base server and the job."""
    wide = (node("a", cpus=4.25),)
    too_wide = base("x", idle=95.0, cpus=4.25)
    found = decide([asks("j")], [too_wide], nodes=wide)
    assert found.ended == {"x": "it has no job, and another one waits for its room"}
    assert found.waiting["j"].startswith("no node has room for the job beside the base server of tiny that is there; ")
    assert decide([asks("j")], nodes=wide).new_bases[TINY].node_id == "a"
    # One with jobs is left alone, and the job says what it waits for.
    busy = decide([asks("j")], [base("x", adapters=1, cpus=4.25)], nodes=wide)
    assert not busy.ended
    assert "one more waits for 4.25 CPUs: node a has 64 GiB but no CPUs free" in busy.waiting["j"]


def test_jobs_of_their_own_never_wait_for_room_that_a_light_job_can_not_use():
    found = decide([asks("j")], nodes=(node("a", cpus=4.0),), queue=[job("own", cpus=4.0, at=9.0)])
    assert [start.job_id for start in found.starts] == ["own"]


def test_a_tenant_gets_no_base_server_for_jobs_that_its_quota_stops():
    paused = PlacementPolicy(quotas={"t": Quota(jobs=0)})
    found = decide([asks("j", adapters=4)], policy=paused)
    assert not found.new_bases
    assert found.waiting == {"j": "quota of tenant t: 0 of 0 jobs"}
    one = PlacementPolicy(quotas={"t": Quota(jobs=1)})
    many = [asks(f"j{i}", adapters=4, at=float(i)) for i in range(9)]
    loading = base("b", state=BaseState.LOADING)
    assert list(decide(many, policy=one).new_bases) == [TINY]
    assert not decide(many, [loading], policy=one).new_bases
    works = runs(asks("k").job, "a")
    assert not decide(many, [base("b", adapters=4)], running=[works], policy=one).new_bases
    other = asks("u", tenant="u", at=99.0)
    assert decide([*many, other], [base("b")], running=[works], policy=one).bases == {"u": "b"}


def test_a_base_server_is_not_kept_for_jobs_that_a_quota_stops():
    paused = PlacementPolicy(quotas={"t": Quota(jobs=0)})
    assert decide([asks("j")], [base("b", idle=40.0)], policy=paused).ended == {"b": "it had no job for 60 s"}
    early = decide([asks("j")], [base("b", idle=90.0)], queue=[job("big", tenant="u", cpus=14.0)], policy=paused)
    assert early.ended == {"b": "it has no job, and another one waits for its room"}


def test_a_job_that_starts_before_one_without_a_base_server_keeps_its_own():
    policy, limits = PlacementPolicy(quotas={"t": Quota(jobs=1)}), replace(LIMITS, resources=Resources(cpus=99.0))
    found = decide([asks("j", OTHER), asks("k", at=1.0)], [base("b", idle=1.0)], policy=policy, limits=limits)
    assert (found.bases, found.ended) == ({"k": "b"}, {})


def test_a_base_server_without_jobs_ends_after_its_time_unless_a_job_goes_there():
    idle = [base("b1", idle=40.0), base("b2", OTHER, idle=41.0), base("b3", adapters=1)]
    found = decide([], idle)
    assert found.ended == {"b1": "it had no job for 60 s"}
    assert found.again_at == 101.0
    assert decide([asks("j")], [base("b1", idle=40.0)]).bases == {"j": "b1"}


def test_one_that_is_idle_ends_at_once_where_another_job_waits_for_its_room():
    idle = [base("b1", idle=90.0), base("b2", OTHER, idle=80.0), base("b3", idle=70.0, where="b")]
    nodes = [node("a", cpus=9.0), node("b", cpus=4.0)]
    found = decide([], idle, queue=[job("big", cpus=5.0)], nodes=nodes)
    assert found.ended == {"b2": "it has no job, and another one waits for its room"}  # b3's room would not do
    both = decide([], idle, queue=[job("big", cpus=9.0)], nodes=nodes)
    assert sorted(both.ended) == ["b1", "b2"]
    assert decide([], idle, queue=[job("big", cpus=99.0)], nodes=nodes).ended == {}
    third = BaseKind("third", False)
    assert decide([asks("j", third)], idle[:2], nodes=nodes[:1]).ended == {
        "b2": "it has no job, and another one waits for its room"
    }


def test_an_idle_one_ends_for_a_job_whose_turn_is_before_those_that_wait_for_it():
    small = (node("a", cpus=4),)
    limits = replace(LIMITS, resources=Resources(cpus=1.0))
    idle, first = base("b", idle=95.0, cpus=1.0), job("own", cpus=4, at=1.0)
    behind = asks("shared", at=2.0)
    policy = PlacementPolicy(aging_seconds=10.0)  # both are overdue
    found = decide([behind], [idle], [first], nodes=small, policy=policy, limits=limits)
    assert set(found.ended) == {"b"}
    assert found.starts == ()
    found = decide([behind], [], [first], nodes=small, policy=policy, limits=limits)
    assert [start.job_id for start in found.starts] == ["own"]
    earlier = asks("shared", at=0.5)  # it starts, and so its base server does not end
    found = decide([earlier], [idle], [first], nodes=small, policy=policy, limits=limits)
    assert found.bases == {"shared": "b"}
    assert not found.ended


def test_idle_ones_that_fill_a_node_make_room_for_a_job_that_waits_for_one_of_them():
    full = (node("a", cpus=8),)
    bases, waiting = [base("b1", idle=95.0), base("b2", OTHER, idle=90.0)], [asks("first", OTHER), asks("second")]
    found = decide(waiting, bases, nodes=full)
    assert set(found.ended) == {"b1"}  # the one whose job has the later turn, though the other was idle for longer
    found = decide(waiting, bases[1:], nodes=full)
    assert found.bases == {"first": "b2"}


def test_the_room_of_a_base_server_goes_to_jobs_in_the_order_of_their_turns():
    asking = [
        asks("new", adapters=4, priority="high", at=99.0),
        asks("old", priority="low", at=1.0),
    ]
    assert decide(asking, [base("b")], policy=PlacementPolicy(aging_seconds=1000.0)).bases == {"new": "b"}
    assert decide(asking, [base("b")], policy=PlacementPolicy(aging_seconds=10.0)).bases == {"old": "b"}


def test_nothing_depends_on_the_order_in_which_things_are_given():
    shared = [asks(f"j{i}", kind, adapters=1 + i % 2) for i, kind in enumerate([TINY, OTHER, TINY, TINY, OTHER])]
    bases = [base("b1", adapters=2), base("b2", OTHER, idle=5.0), replace(base("b3"), state=BaseState.ENDING)]
    assert decide(shared, bases) == decide(shared[::-1], bases[::-1])
