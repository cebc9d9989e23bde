"""Jobs of several processes: where they go, all or none, and what a user is told of the one that has no room."""

from __future__ import annotations

import pytest

from palestra.errors import InvalidRequest
from palestra_control.jobs import Bundle, Resources
from palestra_service.placement.fitting import FreeOnNode, FreeResources, counted, total
from palestra_service.placement.gangs import GangPlaces, fit_gang, gang_of
from palestra_service.placement.placement import Quota
from palestra_service.placement.queues import WaitingJob
from palestra_service.placement.reasons import never_starts
from unit.control.placing import decide, job, node, runs


def gang(*bundles: Bundle, placement="PACK", **own) -> Resources:
    return Resources(bundles=bundles, placement=placement, **own)


def engines(count, **each) -> Bundle:
    return Bundle(role="engine", count=count, **each)


def ranks(count, **each) -> Bundle:
    return Bundle(role="trainer", count=count, **each)


def waiting(job_id, needs: Resources, at=0.0, tenant="t") -> WaitingJob:
    return WaitingJob(job_id=job_id, tenant=tenant, priority="normal", submitted_at=at, needs=needs)


def nodes_of(needs: Resources, *nodes) -> list[str] | None:
    found = fit_gang(gang_of(needs), {room: room for room in map(FreeOnNode, nodes)})
    return [room.node_id for room, _ in found.places] if isinstance(found, GangPlaces) else None


A, B, C = (node(name, cpus=4, gpus=2, memory=16) for name in "abc")


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("PACK", ["a", "a", "a"]), ("STRICT_PACK", ["a", "a", "a"]), ("SPREAD", ["a", "c", "b"])],
)
def test_small_jobs_are_packed_or_spread(placement, expected):
    found = nodes_of(gang(engines(2, cpus=1), cpus=1, placement=placement), A, B, C)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("placement", "distinct"), [("PACK", 2), ("SPREAD", 3), ("STRICT_PACK", None)])
def test_a_job_that_no_node_holds_is_divided_unless_that_is_forbidden(placement, distinct):
    found = nodes_of(gang(ranks(4, cpus=1, gpus=1), cpus=1, placement=placement), A, B, C)
    assert distinct == (found and len(set(found)))
    if found:
        assert max(found[1:].count(name) for name in "abc") <= 2, "a node has two GPUs"


def test_a_packed_job_takes_a_large_node_rather_than_two_small_ones():
    large = node("z", cpus=8, gpus=4)
    assert set(nodes_of(gang(ranks(4, cpus=1, gpus=1), cpus=1), A, B, large)) == {"z"}


def test_labels_and_kinds_of_gpus_choose_nodes():
    plain, fast = node("p", gpus=2, gpu_kind="A100"), node("f", gpus=2, gpu_kind="H100", labels={"zone": "eu"})
    needs = gang(engines(1, gpus=1), ranks(2, gpus=1, gpu_kind="H100", labels={"zone": "eu"}), gpus=0)
    assert nodes_of(needs, plain, fast)[2:] == ["f", "f"]
    assert nodes_of(gang(ranks(2, gpus=1, gpu_kind="H100", labels={"zone": "us"})), plain, fast) is None
    assert decide([waiting("j", Resources(gpus=1, gpu_kind="H100"))], [plain, fast]).where == {"j": "f:0"}


def test_whole_devices_are_given_to_each_process_once():
    start = decide([waiting("j", gang(ranks(3, gpus=1), gpus=1))], [A, B]).decision.starts[0]
    held = [(start.node_id, share.device) for share in start.devices]
    held += [(place.node_id, share.device) for place in start.bundles for share in place.devices]
    assert len(set(held)) == 4
    assert [len(place.devices) for place in start.bundles] == [1, 1, 1]


def test_all_of_a_job_starts_or_nothing_and_the_reason_names_bundle_and_nodes():
    needs = gang(engines(2, cpus=3), cpus=1)
    running = [runs(job("r", cpus=3), "a"), runs(job("s", cpus=2), "b")]
    decision = decide([waiting("j", needs)], [A, B], running).decision
    assert not decision.starts
    assert decision.waiting["j"].startswith(
        "waits for 3 CPUs (engine bundle 1 of 2): node b has 2 GPUs, 2 CPUs and 16 GiB, "
        "node a has 2 GPUs, 1 CPU and 16 GiB free"
    ), decision.waiting["j"]


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (
            gang(engines(1, cpus=9)),
            "needs 9 CPUs on one node for each process of its engine bundle; the largest node has 4",
        ),
        (
            gang(ranks(2, gpus=1, gpu_kind="H100")),
            "needs a node with GPUs of kind H100 for each process of its trainer bundle; there is none",
        ),
        (
            gang(engines(3, cpus=4), cpus=1),
            "needs 1 CPU on one node for its own process, beside its other processes: node a has 2 GPUs and 16 GiB but "
            "no CPUs, node b has 2 GPUs and 16 GiB but no CPUs, node c has 2 GPUs and 16 GiB but no CPUs left",
        ),
        (
            gang(engines(2, cpus=3), placement="STRICT_PACK"),
            "needs 7 CPUs on one node, because its placement is STRICT_PACK; no node has that, and with PACK its "
            "processes may be on several",
        ),
        (Resources(cpus=1, labels={"zone": "eu"}), "needs a node with label zone = eu; there is none"),
        (gang(engines(2, cpus=4), cpus=2), None),
    ],
)
def test_what_can_never_be_placed_is_refused_in_one_line(needs, said):
    found = never_starts(needs, [A, B, C])
    assert found == said if said is None or said[-1] != " " else found.startswith(said), found


def test_quotas_count_every_process():
    needs = gang(engines(2, cpus=2, gpus=1, memory_gib=2), ranks(3, cpus=1), cpus=1, memory_gib=1)
    assert total(needs) == counted(Resources(cpus=8, gpus=2, memory_gib=5))
    said = never_starts(needs, [A, B, C], "t", Quota(cpus=7))
    assert said == "needs 8 CPUs; the quota of tenant t is 7"
    decision = decide([waiting("j", needs)], [A, B, C], quotas={"t": Quota(gpus=2)}).decision
    assert len(decision.starts) == 1
    again = decide(
        [waiting("k", needs)], [A, B, C], [runs(job("r", gpus=1), "c", 0)], quotas={"t": Quota(gpus=2)}
    ).decision
    assert again.waiting["k"] == "quota of tenant t: 1 of 2 GPUs, and it needs 2"


def test_nodes_are_kept_for_all_processes_of_the_first_job_that_waits():
    """Without that, small jobs would take what becomes free, one after the other, and it would wait for ever."""
    first = waiting("first", gang(ranks(2, cpus=4), cpus=1), at=0)
    small = [job(f"small-{number}", cpus=1, tenant="u", at=1 + number) for number in range(4)]
    nodes = [node(name, cpus=5) for name in "abc"]
    running = [runs(job(name, cpus=3, tenant="v"), name, since=ord(name)) for name in "abc"]
    decision = decide([first, *small], nodes, running).decision
    assert decision.waiting["first"].endswith("; nodes a, b are kept for it"), decision.waiting
    assert [start.node_id for start in decision.starts] == ["c", "c"]
    assert decision.waiting["small-2"].endswith(": nodes a, b are kept for it")


def test_a_job_of_several_processes_starts_at_last_beside_a_stream_of_small_ones():
    """The small ones run for 10 s each, two begin every 5 s; what they would leave is never enough by itself."""
    first, now, running = waiting("first", gang(ranks(2, cpus=4), cpus=0.5, gpus=0)), 0.0, {}
    number = 0
    nodes = [node(name, cpus=4.5) for name in "ab"]
    for _ in range(100):
        queue = [first, *(job(f"s{number + extra}", cpus=1, tenant="u", at=now) for extra in range(2))]
        number += 2
        held = [one for _, one in running.values()]
        for start in decide(queue, nodes, held, now=now, aging_seconds=20.0).decision.starts:
            if start.job_id == "first":
                assert {place.node_id for place in start.bundles} == {"a", "b"}
                return
            small = next(one for one in queue if one.job_id == start.job_id)
            running[start.job_id] = now + 10, runs(small, start.node_id, since=now)
        now += 5
        running = {name: (until, one) for name, (until, one) in running.items() if until > now}
    pytest.fail("it has waited for 500 s")


def test_a_kind_of_gpu_without_gpus_is_refused():
    with pytest.raises(InvalidRequest, match=r"gpu_kind.*'H100'.*0.*GPUs"):
        Resources(gpu_kind="H100")


def test_processes_that_are_alike_are_counted_once_for_a_node_and_not_one_by_one(monkeypatch):
    tried, hold_all = 0, FreeResources.hold_all

    def counting(self, needs):
        nonlocal tried
        tried += 1
        return hold_all(self, needs)

    monkeypatch.setattr(FreeResources, "hold_all", counting)
    machines = [node(f"n{number}", cpus=4, memory=64) for number in range(20)]
    found = nodes_of(gang(Bundle(role="runner", count=79)), *machines)
    assert found is not None
    assert len(set(found)) == 20
    assert tried < 1500  # 20 times for at most 20 nodes with room for four; one by one there were 8,000
