"""What starts, in which order, and what those that wait are told: an example for each rule."""

from __future__ import annotations

import math
import re

import pytest

from palestra_service.placement.placement import Quota
from unit.control.placing import decide, job, node, runs

ONE_GPU, TWO_GPUS, FOUR_GPUS = node("a", gpus=1), node("a", gpus=2), node("a", gpus=4)
AGING = 100.0


# Order


@pytest.mark.parametrize(
    ("high_at", "now", "first"),
    [
        # low has waited since 0, and rises at 100, 200 and 300
        (99, 99, "high"),
        (150, 199, "high"),  # low counts as normal
        (150, 200, "low"),  # low counts as high, and was submitted before
        (250, 300, "low"),  # low is overdue
        (150, 300, "high"),  # high is overdue since 250
    ],
)
def test_waiting_raises_priority(high_at, now, first):
    queue = [job("low", gpus=1, priority="low"), job("high", gpus=1, priority="high", at=high_at, tenant="u")]
    assert decide(queue, [ONE_GPU], now=now, aging_seconds=AGING).order == [first]


def test_priority_then_submission_within_a_tenant():
    queue = [
        job("late", at=3),
        job("low", at=1, priority="low"),
        job("high", at=9, priority="high"),
        job("early", at=2),
    ]
    assert decide(queue, [node("a")], now=10).order == ["high", "early", "late", "low"]


def test_the_tenant_that_holds_least_comes_first():
    running = [runs(job("r", gpus=2, tenant="rich"), "a", 0, 1), runs(job("p", gpus=1, tenant="poor"), "a", 2)]
    queue = [job("rich-1", gpus=1, tenant="rich", at=1), job("poor-1", gpus=1, tenant="poor", at=2)]
    assert decide(queue, [FOUR_GPUS], running, now=3).order == ["poor-1"]


def test_dominant_resource_fairness_on_the_example_of_the_paper():
    """Ghodsi et al., section 4.1: of 9 CPUs and 18 GB, A's tasks take 1 and 4, B's 3 and 1: A gets three, B two."""
    queue = [job(f"A{i}", cpus=1, memory=4, tenant="A", at=1) for i in range(9)]
    queue += [job(f"B{i}", cpus=3, memory=1, tenant="B", at=0) for i in range(9)]  # first, as in table 1 of the paper
    placed = decide(queue, [node("all", cpus=9, memory=18)])
    assert placed.order == ["B0", "A0", "A1", "B1", "A2"]


def test_a_long_queue_ages_at_its_head_only():
    """Both tenants have waited for too long; each gets one job before it is a question of shares again."""
    queue = [job(f"flood-{i}", gpus=1, tenant="flood", at=i / 100) for i in range(9)]
    queue += [job(f"small-{i}", gpus=1, tenant="small", at=1 + i / 100) for i in range(2)]
    queue.append(job("fresh", gpus=1, tenant="fresh", priority="high", at=900))
    placed = decide(queue, [FOUR_GPUS], now=901, aging_seconds=AGING)
    assert placed.order == ["flood-0", "small-0", "fresh", "flood-1"]
    later = [runs(one, "a", i, since=901) for i, one in enumerate([queue[0], queue[9], queue[11]])]
    assert decide(queue[1:9], [FOUR_GPUS], later, now=950, aging_seconds=AGING).order == ["flood-1"]
    urgent = job("urgent", gpus=1, tenant="other", priority="high", at=949)
    assert decide([*queue[1:9], urgent], [FOUR_GPUS], later, now=950, aging_seconds=AGING).order == ["urgent"]


# Backfill: `big` needs both GPUs of node a, of which one is in use


BIG, SMALL, LITTLE = job("big", gpus=2, at=1), job("small", gpus=1, at=2), job("little", cpus=1, at=2)
BUSY = job("busy", gpus=1)


def quick(seconds, gpus=1.0):
    return job("quick", gpus=gpus, at=2, seconds=seconds)


@pytest.mark.parametrize(
    ("behind", "busy_ends", "now", "where"),
    [
        # what comes behind   expected end of busy   now   what starts
        (SMALL, None, 10, {}),  # it could hold what big needs for ever
        (SMALL, 100, 10, {}),
        (LITTLE, None, 10, {"little": "a"}),  # big does not need that CPU
        (quick(50), None, 10, {}),  # nobody knows when big could start
        (quick(50), 100, 10, {"quick": "a:1"}),  # over before
        (quick(90), 100, 10, {"quick": "a:1"}),
        (quick(91), 100, 10, {}),
        (quick(50), 100, 101, {}),  # busy should be over and is not: nobody knows
        (quick(50), 400, 301, {}),  # big is overdue, and no estimate is trusted
    ],
)
def test_what_may_start_behind_a_job_that_waits_for_room(behind, busy_ends, now, where):
    placed = decide([BIG, behind], [TWO_GPUS], [runs(BUSY, "a", 0, ends=busy_ends)], now=now, aging_seconds=AGING)
    assert placed.where == where
    free = r"14 CPUs and 64 GiB but no GPUs" if "quick" in where else r"1 GPU, 1\d CPUs and 64 GiB"
    assert re.fullmatch(
        f"waits for 2 GPUs and 1 CPU: node a has {free} free; node a is kept for it", placed.waiting["big"]
    )


def test_other_nodes_are_free_to_use():
    placed = decide([BIG, SMALL], [TWO_GPUS, node("b", gpus=1)], [runs(BUSY, "a", 0)], now=10)
    assert placed.where == {"small": "b:0"}


def test_what_the_large_job_leaves_may_be_used():
    """Of four GPUs two are in use and big needs three, so one may be used whatever ends."""
    big, running = job("big", gpus=3, at=1), [runs(job("r0", gpus=1), "a", 0), runs(job("r1", gpus=1), "a", 1, since=5)]
    assert decide([big, SMALL], [FOUR_GPUS], running, now=10).where == {}  # r0 ends: three are free, and big takes them
    running = [runs(job("r01", gpus=2), "a", 0, 1)]
    placed = decide([big, SMALL, job("next", gpus=1, at=3)], [FOUR_GPUS], running, now=10)
    assert placed.where == {"small": "a:2"}  # r01 ends: four are free
    assert placed.waiting["next"] == "behind job big of the same priority: node a is kept for it"


def test_the_node_is_kept_where_the_job_can_start_soonest():
    nodes = [node("a", gpus=2), node("b", gpus=2)]
    running = [runs(job("r0", gpus=1), "a", 0, ends=90), runs(job("r1", gpus=1), "b", 0, ends=50)]
    assert decide([BIG, SMALL], nodes, running, now=10).where == {"small": "a:1"}


def test_without_estimates_it_is_where_jobs_have_run_longest():
    nodes = [node("a", gpus=2), node("b", gpus=2)]
    running = [runs(job("r0", gpus=1), "a", 0, since=7), runs(job("r1", gpus=1), "b", 0, since=3)]
    assert decide([BIG, SMALL], nodes, running, now=10).where == {"small": "a:1"}


def test_nobody_waits_for_the_end_of_an_endless_job():
    """It has run longest, but the node is kept where jobs end; where there is none, nothing is kept."""
    endless = runs(job("server", gpus=1), "a", 0, since=1, ends=math.inf)
    nodes, other = [node("a", gpus=2), node("b", gpus=2)], runs(job("r1", gpus=1), "b", 0, since=3)
    assert decide([BIG, SMALL], nodes, [endless, other], now=10).where == {"small": "a:1"}
    assert decide([BIG, SMALL], nodes[:1], [endless], now=10).where == {"small": "a:1"}


def test_an_equal_job_does_not_pass_its_elder_by_a_better_estimate():
    queue = [BIG, job("elder", gpus=1, at=2), job("younger", gpus=1, at=3, seconds=5)]
    running = [runs(BUSY, "a", 0, ends=100)]
    assert decide(queue, [TWO_GPUS], running, now=10).where == {}
    assert decide([BIG, queue[2]], [TWO_GPUS], running, now=10).where == {"younger": "a:1"}


def test_no_node_is_kept_for_a_job_that_only_a_dead_node_could_hold():
    placed = decide([BIG, SMALL], [node("a", gpus=1), node("b", gpus=2, alive=False)], now=10)
    assert placed.where == {"small": "a:0"}
    assert placed.waiting == {"big": "waits for node b, which is not alive"}


# Quotas


@pytest.mark.parametrize(
    ("quota", "new", "reason"),
    [
        # tenant t holds 2 GPUs, 3 CPUs, 4 GiB with one job
        (Quota(gpus=2), job("new", gpus=1), "quota of tenant t: 2 of 2 GPUs"),
        (Quota(gpus=3), job("new", gpus=2), "quota of tenant t: 2 of 3 GPUs, and it needs 2"),
        (Quota(cpus=3.5), job("new"), "quota of tenant t: 3 of 3.5 CPUs, and it needs 1"),
        (Quota(memory_gib=4), job("new", memory=1), "quota of tenant t: 4 of 4 GiB"),
        (Quota(jobs=1), job("new"), "quota of tenant t: 1 of 1 jobs"),
        (Quota(jobs=0), job("new"), "quota of tenant t: 1 of 0 jobs"),
        (Quota(gpus=2), job("new"), None),  # it needs no GPU
        (Quota(gpus=3), job("new", gpus=1), None),
        (Quota(gpus=2), job("new", gpus=1, tenant="u"), None),  # each tenant has its own
    ],
)
def test_quotas(quota, new, reason):
    running = [runs(job("r", gpus=2, cpus=3, memory=4), "a", 0, 1)]
    placed = decide([new], [FOUR_GPUS], running, quotas={"t": quota})
    assert placed.waiting == ({} if reason is None else {"new": reason})


def test_the_quota_is_kept_for_the_first_that_waits():
    running = [runs(job("r", gpus=1), "a", 0)]
    queue = [job("big", gpus=2, at=1), job("small", gpus=1, at=2), job("cpu", at=3), job("u", gpus=1, tenant="u", at=4)]
    placed = decide(queue, [FOUR_GPUS], running, quotas={"t": Quota(gpus=2)})
    assert placed.where == {"cpu": "a", "u": "a:1"}
    assert placed.waiting == {
        "big": "quota of tenant t: 1 of 2 GPUs, and it needs 2",
        "small": "behind job big: the quota of tenant t is kept for it",
    }


def test_no_quota_is_kept_for_a_job_that_would_have_to_wait_for_an_endless_one():
    queue, server = [BIG, SMALL], job("server", gpus=1)
    for ends, where in ((None, {}), (math.inf, {"small": "a:1"})):
        running = [runs(server, "a", 0, ends=ends)]
        assert decide(queue, [FOUR_GPUS], running, quotas={"t": Quota(gpus=2)}).where == where


def test_no_quota_is_kept_for_a_job_that_only_a_dead_node_could_hold():
    queue, nodes = [BIG, SMALL], [node("a", gpus=1), node("b", gpus=2, alive=False)]
    assert decide(queue, nodes, quotas={"t": Quota(gpus=2)}).where == {"small": "a:0"}


def test_what_starts_elsewhere_does_not_use_the_quota_of_the_job_for_which_a_node_is_kept():
    queue = [BIG, job("small", gpus=1, at=2)]
    nodes, running = [TWO_GPUS, node("b", gpus=1)], [runs(job("busy", gpus=1, tenant="u"), "a", 0)]
    assert decide(queue, nodes, running, quotas={"t": Quota(gpus=3)}).where == {"small": "b:0"}
    assert decide(queue, nodes, running, quotas={"t": Quota(gpus=2)}).where == {}


# Limits on starts, and draining


def test_starts_at_once():
    queue = [job(f"j{i}", at=i) for i in range(3)]
    placed = decide(queue, [node("a")], starts_at_once=2)
    assert (placed.order, placed.waiting) == (["j0", "j1"], {"j2": "2 starts are going on"})
    running = [runs(queue[0], "a", starting=True), runs(queue[1], "a")]
    placed = decide([*queue[2:], job("j3", at=3)], [node("a")], running, starts_at_once=2)
    assert (placed.order, placed.waiting) == (["j2"], {"j3": "2 starts are going on"})


def test_nothing_starts_while_the_cluster_drains():
    placed = decide([job("new"), job("never", cpus=99)], [node("a")], draining=True)
    assert placed.waiting == {"new": "the cluster is draining, so nothing starts"}
    assert list(placed.impossible) == ["never"]
    assert placed.decision.again_at is None


# Reasons


@pytest.mark.parametrize(
    ("new", "nodes", "running", "reason"),
    [
        (
            job("new", gpus=2),
            [node("a", gpus=2), node("b", gpus=2)],
            [runs(job("r0", gpus=1), "a", 0), runs(job("r1", gpus=2), "b", 0, 1)],
            "waits for 2 GPUs and 1 CPU: node a has 1 GPU, 15 CPUs and 64 GiB, node b has 15 CPUs and 64 GiB but "
            "no GPUs free; node a is kept for it",
        ),
        (
            job("new", gpus=0.5),
            [node("a", gpus=2)],
            [runs(job("r0", gpus=0.6), "a", 0), runs(job("r1", gpus=0.75), "a", 1)],
            "waits for 0.5 GPU and 1 CPU: node a has 0.4 GPU, 14 CPUs and 64 GiB free; node a is kept for it",
        ),
        (
            job("new", memory=60),
            [node("a")],
            [runs(job("r", memory=4.5), "a")],
            "waits for 1 CPU and 60 GiB: node a has 15 CPUs and 59.5 GiB free; node a is kept for it",
        ),
        (
            job("new", cpus=10),
            [node(name) for name in "abcde"],
            [runs(job(f"r{name}", cpus=cpus), name) for name, cpus in zip("abcde", (9, 8, 7.5, 9, 9), strict=True)],
            "waits for 10 CPUs: node c has 8.5 CPUs and 64 GiB, node b has 8 CPUs and 64 GiB, "
            "node a has 7 CPUs and 64 GiB free; node a is kept for it",
        ),
        (
            job("new", gpus=1, cpus=8),
            [node("a", gpus=1), node("b", gpus=1)],
            [runs(job("r0", cpus=10), "a"), runs(job("r1", gpus=1), "b", 0)],
            "waits for 1 GPU and 8 CPUs: node a has 1 GPU, 6 CPUs and 64 GiB, node b has 15 CPUs and 64 GiB but "
            "no GPUs free; node a is kept for it",
        ),
        (job("new"), [], [], "waits for a node: there is none"),
    ],
)
def test_what_is_missing_is_told(new, nodes, running, reason):
    assert decide([new], nodes, running).waiting == {"new": reason}


@pytest.mark.parametrize(
    ("first", "now", "reason"),
    [
        (job("big", gpus=2, at=1), 5, "behind job big of the same priority"),
        (job("big", gpus=2, at=1, priority="high"), 5, "behind job big of priority high"),
        (job("big", gpus=2, at=1), 500, "behind job big that has waited for too long"),
        (job("big", gpus=2, at=1, tenant="u"), 5, "behind a job of another tenant of the same priority"),  # no id
    ],
)
def test_who_is_first_is_told(first, now, reason):
    small = job("small", gpus=1, at=now)
    placed = decide([first, small], [TWO_GPUS], [runs(job("r", gpus=1, tenant="z"), "a", 0)], now, aging_seconds=AGING)
    assert placed.waiting["small"] == f"{reason}: node a is kept for it"


# When to ask again


@pytest.mark.parametrize(
    ("queue", "policy", "again_at"),
    [
        ([], {}, None),
        ([BIG], {}, None),  # nothing that waits would fit: only an end helps
        ([BIG, SMALL], {}, 90),  # busy should be over, and if not, another node might be kept
        ([BIG, job("small", gpus=1, at=-40)], {}, 60),  # then it has waited for 100 s, and passes
        ([BIG, SMALL], {"starts_at_once": 0}, None),
        ([SMALL], {}, None),  # it starts
    ],
)
def test_when_to_ask_again(queue, policy, again_at):
    big_first = [job("big", gpus=2, at=1, priority="high") if one is BIG else one for one in queue]
    placed = decide(big_first, [TWO_GPUS], [runs(BUSY, "a", 0, ends=90)], now=10, aging_seconds=AGING, **policy)
    assert placed.decision.again_at == again_at
