"""Where a job starts: on the node, and the devices, where the least is left over."""

from __future__ import annotations

import pytest

from palestra_control.jobs import Resources
from palestra_service.placement.fitting import Amounts, Node, counted
from palestra_service.placement.placement import Quota
from palestra_service.placement.reasons import never_starts
from unit.control.placing import decide, job, node, runs

CPU, TWO, FOUR = node("cpu", cpus=8), node("two", gpus=2), node("four", gpus=4)
HALF, FIFTH, ONE, PAIR = job("half", gpus=0.5), job("fifth", gpus=0.2), job("one", gpus=1), job("pair", gpus=2)
EIGHT = job("eight", cpus=8)


@pytest.mark.parametrize(
    ("needs", "nodes", "running", "where"),
    [
        # needs           nodes               what runs                                    where it starts
        ({}, [CPU, TWO, FOUR], [], "cpu"),  # without GPUs: where there are none
        ({}, [TWO, FOUR], [], "two"),  # … or where fewer lie idle
        ({}, [TWO, FOUR], [runs(job("r", gpus=4), "four", 0, 1, 2, 3)], "four"),  # … or none
        ({"cpus": 8.0}, [CPU, node("cpus-10", cpus=10)], [], "cpu"),  # the CPUs are used up
        ({"memory": 8.0}, [node("a", memory=64), node("b", memory=9)], [], "b"),  # so is memory
        ({"gpus": 1.0}, [CPU, TWO, FOUR], [], "two:0"),  # more whole devices stay together
        ({"gpus": 2.0}, [TWO, FOUR], [], "two:0,1"),
        ({"gpus": 3.0}, [TWO, FOUR], [], "four:0,1,2"),
        ({"gpus": 2.0}, [FOUR], [runs(ONE, "four", 1)], "four:0,2"),
        ({"gpus": 1.0}, [FOUR], [runs(HALF, "four", 0)], "four:1"),  # whole ones only
        ({"gpus": 0.5}, [TWO, FOUR], [runs(FIFTH, "four", 2)], "four:2"),  # a used device before a new one
        ({"gpus": 0.5}, [TWO, FOUR], [runs(FIFTH, "two", 1), runs(HALF, "four", 3)], "four:3"),  # the fullest
        ({"gpus": 0.6}, [TWO], [runs(HALF, "two", 0)], "two:1"),  # on one device, never on two
        ({"gpus": 0.5}, [TWO, FOUR], [], "two:0"),
        ({}, [node("a"), node("b")], [], "a"),  # equals: the first by name
        ({}, [node("b"), node("a")], [], "a"),
    ],
)
def test_best_fit(needs, nodes, running, where):
    assert decide([job("new", **needs)], nodes, running).where == {"new": where}


def test_ten_tenths_are_one_device_exactly():
    tenths = [job(f"tenth-{i}", gpus=0.1) for i in range(11)]
    placed = decide(tenths, [node("a", gpus=1)])
    assert set(placed.where.values()) == {"a:0"}
    assert len(placed.where) == 10
    assert list(placed.waiting) == ["tenth-9"]  # the eleventh in the order of ids


def test_parts_are_packed_and_whole_devices_stay_free():
    queue = [job("q1", gpus=0.25, at=1), job("q2", gpus=0.75, at=2), job("q3", gpus=0.5, at=3), job("w", gpus=2, at=4)]
    assert decide(queue, [node("a", gpus=4)]).where == {"q1": "a:0", "q2": "a:0", "q3": "a:1", "w": "a:2,3"}


@pytest.mark.parametrize("state", [{"alive": False}, {"draining": True}])
def test_nothing_starts_on_a_node_that_is_dead_or_draining(state):
    placed = decide([job("new")], [node("a", **state), node("b", cpus=0.5)])
    assert placed.where == {}
    assert placed.waiting == {
        "new": "waits for node a, which is " + ("draining" if "draining" in state else "not alive")
    }


def test_what_a_node_lost_is_not_given_twice():
    """It came back with one device where there were two, both in use."""
    placed = decide([job("new", gpus=0.5)], [node("a", gpus=1)], [runs(PAIR, "a", 0, 1)])
    assert placed.waiting == {
        "new": "waits for 0.5 GPU and 1 CPU: node a has 15 CPUs and 64 GiB but no GPUs free; node a is kept for it"
    }


@pytest.mark.parametrize(
    ("needs", "nodes", "reason"),
    [
        ({"gpus": 8.0}, [TWO, FOUR], "needs 8 GPUs on one node; the largest node has 4"),
        ({"cpus": 16.5}, [CPU, TWO], "needs 16.5 CPUs on one node; the largest node has 16"),
        ({"memory": 65.0}, [TWO], "needs 65 GiB on one node; the largest node has 64"),
        ({"gpus": 0.5}, [CPU], "needs 0.5 GPU on one node; the largest node has 0"),
        (
            {"gpus": 2.0, "cpus": 12.0, "memory": 4.0},
            [node("a", gpus=2, cpus=8), node("b", cpus=16)],
            "needs 2 GPUs, 12 CPUs and 4 GiB on one node; the nearest has 2 GPUs, 8 CPUs and 64 GiB",
        ),
        ({"gpus": 8.0}, [], None),  # there may be nodes tomorrow
        ({"gpus": 4.0}, [TWO, node("dead", gpus=4, alive=False)], None),  # it may come back
    ],
)
def test_what_can_never_start_is_told_at_once(needs, nodes, reason):
    new = job("new", **needs)
    assert decide([new], nodes).impossible == ({} if reason is None else {"new": reason})
    assert never_starts(new.needs, nodes) == reason


@pytest.mark.parametrize(
    ("quota", "reason"),
    [
        (Quota(gpus=4), "needs 8 GPUs; the quota of tenant t is 4"),
        (Quota(cpus=0.5), "needs 1 CPU; the quota of tenant t is 0.5"),
        (Quota(memory_gib=1), "needs 2 GiB; the quota of tenant t is 1"),
        (Quota(gpus=8), None),
        (Quota(jobs=0), None),  # a pause, not a refusal
    ],
)
def test_what_a_quota_never_allows_is_told_at_once(quota, reason):
    new = job("new", gpus=8, memory=2)
    assert never_starts(new.needs, [node("a", gpus=8)], "t", quota) == reason
    placed = decide([new], [node("a", gpus=8)], quotas={"t": quota})
    assert placed.impossible == ({} if reason is None else {"new": reason})


def test_amounts_are_whole_numbers():
    assert counted(Resources(cpus=0.1, gpus=0.3333, memory_gib=0.1)) == Amounts(1000, 3333, 103)  # memory rounds up
    size = Node(node_id="a", cpus=0.3, gpus=2, memory_gib=0.1).capacity
    assert size == Amounts(3000, 20_000, 102)  # … and what there is rounds down
