"""Whatever happens to jobs and nodes, nothing is given twice and nothing waits for ever."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra_control.jobs import PRIORITIES, Resources
from palestra_service.placement.fitting import Node
from palestra_service.placement.placement import PlacementPolicy, Quota, place
from palestra_service.placement.queues import WaitingJob
from property.virtual_cluster import AGING, LONGEST, STARTING, Cluster

pytestmark = pytest.mark.ci

EVERYTHING = PlacementPolicy(starts_at_once=1_000_000, aging_seconds=AGING)

needs_lists = st.one_of(
    st.sampled_from([Resources(gpus=0.5), Resources(gpus=1.0), Resources(cpus=0.1, gpus=2.0), Resources()]),
    st.builds(
        Resources,
        cpus=st.sampled_from([0.1, 0.5, 2.0, 3.0]),
        gpus=st.sampled_from([0.0, 0.1, 0.3333, 0.75, 1.0, 2.0, 4.0]),
        memory_gib=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    ),
)


@st.composite
def jobs(draw, number) -> tuple[WaitingJob, float]:
    """A job and how long it really runs, which need not be what is expected."""
    seconds = draw(st.integers(1, int(LONGEST)))
    job = WaitingJob(
        job_id=f"job-{number}",
        tenant=draw(st.sampled_from("tuv")),
        priority=draw(st.sampled_from(PRIORITIES)),
        submitted_at=float(draw(st.integers(0, 100))),
        needs=draw(needs_lists),
        expected_seconds=draw(st.sampled_from([None, seconds, seconds + STARTING, 5.0, 60.0])),
    )
    return job, float(seconds)


@st.composite
def node_lists(draw) -> list[Node]:
    return [
        Node(
            node_id=name,
            cpus=draw(st.sampled_from([0.5, 2.0, 4.0])),
            gpus=draw(st.integers(0, 4)),
            memory_gib=draw(st.sampled_from([1.0, 4.0])),
        )
        for name in "abc"[: draw(st.integers(1, 3))]
    ]


@st.composite
def quota_lists(draw) -> Quota:
    return Quota(
        jobs=draw(st.sampled_from([None, 1, 3])),
        cpus=draw(st.sampled_from([None, 2.0, 3.5])),
        gpus=draw(st.sampled_from([None, 1.0, 2.5])),
        memory_gib=draw(st.sampled_from([None, 3.0])),
    )


@st.composite
def stories(draw):
    """Nodes, a policy, jobs, and what happens to nodes before all is well again at 200 s."""
    nodes = draw(node_lists())
    quotas = {tenant: draw(quota_lists()) for tenant in "tu"}
    starts = draw(st.sampled_from([1, 2, 1000]))
    policy = PlacementPolicy(quotas=quotas, starts_at_once=starts, aging_seconds=AGING)
    queue = [draw(jobs(number)) for number in range(draw(st.integers(1, 15)))]
    troubles = draw(
        st.lists(
            st.tuples(st.integers(0, 199), st.sampled_from(nodes), st.sampled_from(["dead", "draining", "well"])),
            max_size=6,
        )
    )
    return nodes, policy, queue, troubles, draw(st.lists(st.integers(0, 199), max_size=2, unique=True))


def cluster_of(story) -> Cluster:
    nodes, policy, queue, troubles, drains = story
    cluster = Cluster(nodes, policy, {job.job_id: seconds for job, seconds in queue})
    for job, _ in queue:
        cluster.at(job.submitted_at, cluster.submit, job)
    for when, node, state in troubles:
        changed = replace(node, alive=state != "dead", draining=state == "draining")
        cluster.at(float(when), cluster.set_node, changed)
    for when in drains:
        cluster.at(float(when), cluster.set_policy, replace(policy, draining=when % 2 == 0))
    cluster.at(200.0, cluster.set_policy, policy)
    for node in nodes:
        cluster.at(200.0, cluster.set_node, node)
    return cluster


@given(stories())
def test_all_jobs_that_can_fit_run_and_nothing_is_given_twice_or_leaked(story):
    _, policy, queue, *_ = story
    cluster = cluster_of(story)
    check = cluster.check

    def check_all() -> None:
        check()
        for tenant, quota in policy.quotas.items():
            cluster.check_quotas(tenant, quota)

    cluster.check = check_all
    cluster.run()
    assert not cluster.waiting
    assert not cluster.running
    assert sorted([*cluster.ended, *cluster.impossible]) == sorted(job.job_id for job, _ in queue)
    # When all is well again something always runs until all is done, also while a node is kept.
    assert all(ended <= 200 + len(queue) * (LONGEST + STARTING) for ended in cluster.ended.values())


@pytest.mark.slow
@given(stories(), st.randoms(use_true_random=False), st.integers(0, 150))
def test_a_decision_does_not_depend_on_the_order_of_its_inputs(story, random, until):
    cluster = cluster_of(story)
    cluster.run(until=until)
    for job, _ in story[2]:  # more of them than have been decided on
        if job.job_id not in cluster.started:
            cluster.waiting[job.job_id] = job
    queue, nodes = list(cluster.waiting.values()), list(cluster.nodes.values())
    running = [held for _, held in cluster.running.values()]
    decision = place(queue, running, nodes, cluster.policy, until)
    for listed in (queue, running, nodes):
        random.shuffle(listed)
    assert place(queue, running, nodes, cluster.policy, until) == decision


SYSTEM = 12  # small jobs that wait or run at any time


@examples(8, 30)
@given(st.data())
def test_a_large_job_starts_in_bounded_time_while_small_ones_flow_past(data):
    """Whenever a small job ends another comes, of tenants that hold less, of any priority, with estimates that lie."""
    draw = data.draw
    nodes = [Node(node_id=name, cpus=16.0, gpus=draw(st.integers(2, 4)), memory_gib=4.0) for name in "ab"]
    nodes.append(Node(node_id="server", cpus=16.0, gpus=8, memory_gib=4.0))
    most = max(node.gpus for node in nodes[:2])
    quotas = {"t": Quota(gpus=draw(st.sampled_from([None, 8.0 + most])))}
    policy = PlacementPolicy(quotas=quotas, starts_at_once=draw(st.sampled_from([2, 1000])), aging_seconds=AGING)
    shared = {"tenant": "t", "priority": draw(st.sampled_from(PRIORITIES))}
    server = WaitingJob(
        job_id="server", submitted_at=0.0, needs=Resources(gpus=8.0), expected_seconds=float("inf"), **shared
    )
    large = WaitingJob(
        job_id="large",
        submitted_at=20.0,
        needs=Resources(gpus=float(most)),
        expected_seconds=draw(st.sampled_from([None, 10.0])),
        **shared,
    )
    cluster = Cluster(nodes, policy, {"large": 10.0, "server": 1e9})
    numbers, flow, chance = (
        itertools.count(),
        draw(st.sampled_from(["t", "uvw", "tuvw"])),
        draw(st.randoms(use_true_random=False)),
    )

    def one_more() -> None:
        seconds = chance.uniform(1.0, LONGEST)
        job = WaitingJob(
            job_id=f"small-{next(numbers)}",
            tenant=chance.choice(flow),
            priority=chance.choice(PRIORITIES),
            submitted_at=cluster.now,
            needs=Resources(cpus=0.1, gpus=chance.choice([0.5, 1.0])),
            expected_seconds=chance.choice([None, 1.0, seconds]),
        )
        cluster.seconds[job.job_id] = seconds
        cluster.submit(job)

    end = cluster._end

    def end_and_submit(*arguments):
        result = end(*arguments)
        if result is None:
            one_more()
        return result

    cluster._end = end_and_submit
    cluster.at(0.0, cluster.submit, server)
    for _ in range(SYSTEM):
        cluster.at(0.5, one_more)
    cluster.at(large.submitted_at, cluster.submit, large)
    # Overdue after three times AGING; then at most all others are so for longer, and run one after the other.
    deadline = large.submitted_at + AGING * len(PRIORITIES) + (SYSTEM + 1) * (LONGEST + STARTING)
    cluster.run(until=deadline, stop=lambda: "large" in cluster.started)
    assert "large" in cluster.started


@given(st.data())
def test_shares_are_those_of_dominant_resource_fairness(data):
    """An oracle in fractions: always the next task of the tenant with the least dominant share (Ghodsi et al.)."""
    cpus, memory = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    demands = {tenant: (data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))) for tenant in "ABC"}
    queue = [
        WaitingJob(
            job_id=f"{tenant}{i:02}",
            tenant=tenant,
            priority="normal",
            submitted_at=float(i),
            needs=Resources(cpus=float(need[0]), memory_gib=float(need[1])),
        )
        for tenant, need in demands.items()
        for i in range(40)
        if need[0] <= cpus and need[1] <= memory
    ]
    node = Node(node_id="all", cpus=float(cpus), gpus=0, memory_gib=float(memory))
    found = [start.job_id for start in place(queue, [], [node], EVERYTHING, 40.0).starts]
    counts, free, expected = Counter(), [cpus, memory], []
    while True:
        able = [tenant for tenant in demands if f"{tenant}00" in {job.job_id for job in queue} and counts[tenant] < 40]
        shares = {
            tenant: counts[tenant] * max(Fraction(demands[tenant][0], cpus), Fraction(demands[tenant][1], memory))
            for tenant in able
        }
        if not able:
            break
        tenant = min(able, key=lambda name: (shares[name], counts[name], name))
        need = demands[tenant]
        if need[0] > free[0] or need[1] > free[1]:
            break  # from here on it is backfill
        free = [have - take for have, take in zip(free, need, strict=True)]
        expected.append(f"{tenant}{counts[tenant]:02}")
        counts[tenant] += 1
    assert found[: len(expected)] == expected
