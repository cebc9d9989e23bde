"""Whatever jobs, base servers and nodes there are: nothing is given twice, and no base server with work ends."""

from __future__ import annotations

from collections import Counter

from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.types.states import BaseState
from palestra_control.jobs import PRIORITIES, BaseKind, Resources
from palestra_service.placement.bases import BaseLimits, RunningBase, WaitingForBase
from palestra_service.placement.fitting import Node, RunningJob
from palestra_service.placement.placement import PlacementPolicy
from palestra_service.placement.queues import WaitingJob
from palestra_service.placement.sharing import SERVICE, Cluster, place_all
from palestra_service.placement.tenants import Quota

KINDS = [BaseKind("one", False), BaseKind("one", True), BaseKind("two", False)]
LIMITS = BaseLimits(resources=Resources(cpus=2.0), adapters=4, waiting=8, idle_seconds=50.0)
NOW = 100.0


@st.composite
def asking(draw, number: int) -> WaitingForBase:
    job = WaitingJob(
        job_id=f"job-{number}",
        tenant=draw(st.sampled_from("tuv")),
        priority=draw(st.sampled_from(PRIORITIES)),
        submitted_at=float(draw(st.integers(0, 90))),
        needs=Resources(cpus=draw(st.sampled_from([0.25, 1.0, 3.0]))),
    )
    return WaitingForBase(job=job, kind=draw(st.sampled_from(KINDS)), adapters=draw(st.integers(1, 5)))


@st.composite
def serving(draw, number: int) -> RunningBase:
    state = draw(st.sampled_from(list(BaseState)))
    adapters = draw(st.integers(0, 4)) if state is BaseState.SERVING else 0
    idle = state is BaseState.SERVING and not adapters
    held = RunningJob(
        job_id=f"base-{number}",
        tenant=SERVICE,
        submitted_at=0.0,
        needs=LIMITS.resources,
        node_id=draw(st.sampled_from("ab")),
        devices=(),
        since=0.0,
        starting=state is BaseState.LOADING,
    )
    return RunningBase(
        base_id=f"base-{number}",
        kind=draw(st.sampled_from(KINDS)),
        state=state,
        jobs=adapters,
        adapters=adapters,
        waiting=draw(st.sampled_from([0, 8, 9])),
        idle_since=float(draw(st.integers(0, 99))) if idle else None,
        held=held,
    )


@st.composite
def worlds(draw):
    shared = [draw(asking(number)) for number in range(draw(st.integers(0, 6)))]
    bases = [draw(serving(number)) for number in range(draw(st.integers(0, 4)))]
    own = [draw(asking(number + 10)).job for number in range(draw(st.integers(0, 3)))]
    nodes = [Node(node_id=name, cpus=float(draw(st.integers(1, 9))), gpus=0, memory_gib=8.0) for name in "ab"]
    return shared, bases, own, nodes


@examples(40, 400)
@given(worlds())
def test_every_decision_keeps_to_the_rules(world):
    shared, bases, own, nodes = world
    policy = PlacementPolicy(starts_at_once=100, quotas={"u": Quota(jobs=1), "v": Quota(jobs=0)})
    found = place_all(own, shared, Cluster(nodes=nodes, bases=bases), policy, LIMITS, NOW)
    known = {base.base_id: base for base in bases}
    asked = {one.job.job_id: one for one in shared}
    started = [start.job_id for start in found.starts]

    everything = sorted([*asked, *(job.job_id for job in own)])
    assert sorted([*started, *found.waiting, *found.impossible]) == everything  # each exactly once
    assert sorted(found.bases) == sorted(name for name in started if name in asked)

    gets = Counter[str]()
    for job_id, base_id in found.bases.items():
        base = known[base_id]
        assert (base.kind, base.state) == (asked[job_id].kind, BaseState.SERVING)
        assert base.waiting <= LIMITS.waiting
        gets[base_id] += asked[job_id].adapters
    assert all(known[name].adapters + count <= LIMITS.adapters for name, count in gets.items())

    for base_id in found.ended:
        assert known[base_id].idle_since is not None
        assert base_id not in gets

    for kind in found.new_bases:  # only where none that serves or loads would do for some job
        assert any(one.kind == kind and one.job.job_id in found.waiting and one.job.tenant != "v" for one in shared)

    needs = {one.job.job_id: one.job.needs for one in shared} | {job.job_id: job.needs for job in own}
    for node in nodes:
        held = sum(base.held.needs.cpus for base in bases if base.held.node_id == node.node_id)
        comes = sum(needs[start.job_id].cpus for start in found.starts if start.node_id == node.node_id)
        comes += sum(LIMITS.resources.cpus for start in found.new_bases.values() if start.node_id == node.node_id)
        assert not comes or held + comes <= node.cpus


@examples(20, 200)
@given(worlds(), st.randoms())
def test_the_order_in_which_things_are_given_does_not_matter(world, random):
    first = place_all(world[2], world[0], Cluster(nodes=world[3], bases=world[1]), PlacementPolicy(), LIMITS, NOW)
    for things in world:
        random.shuffle(things)
    assert (
        place_all(world[2], world[0], Cluster(nodes=world[3], bases=world[1]), PlacementPolicy(), LIMITS, NOW) == first
    )
