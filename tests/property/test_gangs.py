"""Jobs of several processes on random nodes: nothing is given twice, and equal processes find the room there is."""

from __future__ import annotations

from collections import Counter

from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra_control.jobs import SHARES, Bundle, Resources
from palestra_service.placement.fitting import Allocation, FreeOnNode, Node
from palestra_service.placement.gangs import GangPlaces, fit_gang, gang_of, reserve

amounts = st.tuples(st.integers(1, 4), st.sampled_from((0.0, 0.5, 1.0, 2.0)))
placements = st.sampled_from(("PACK", "STRICT_PACK", "SPREAD"))
nodes = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=4)


def rooms_of(sizes):
    return [FreeOnNode(Node(node_id=f"n{i}", cpus=c, gpus=g, memory_gib=0)) for i, (c, g) in enumerate(sizes)]


def job(own, others, placement) -> Resources:
    roles = ("engine", "trainer", "runner")
    bundles = [
        Bundle(role=role, count=count, cpus=cpus, gpus=gpus)
        for role, (count, (cpus, gpus)) in zip(roles, others, strict=False)
    ]
    return Resources(cpus=own[0], gpus=own[1], bundles=tuple(bundles), placement=placement)


@examples(100, 1000)
@given(nodes, amounts, st.lists(st.tuples(st.integers(1, 3), amounts), max_size=3), placements)
def test_what_is_placed_fits_and_strict_packs_are_on_one_node(sizes, own, others, placement):
    gang, rooms = gang_of(job(own, others, placement)), rooms_of(sizes)
    found = fit_gang(gang, {room: room for room in rooms})
    assert [(room.cpus, room.gpus) for room in rooms] == [(c * SHARES, g * SHARES) for c, g in sizes], "unchanged"
    if not isinstance(found, GangPlaces):
        return
    cpus, devices = Counter(), Counter()
    for part, (room, given_devices) in zip(gang.parts, found.places, strict=True):
        cpus[room.node_id] += part.needs.cpus
        assert sum(share.share for share in given_devices) == part.needs.gpus
        for share in given_devices:
            devices[room.node_id, share.device] += share.share
    assert all(cpus[room.node_id] <= room.cpus for room in rooms)
    assert all(share <= SHARES for share in devices.values())
    if placement == "STRICT_PACK":
        assert len(cpus) == 1
    one = fit_gang(gang._replace(placement="STRICT_PACK"), {room: room for room in rooms})
    if placement == "PACK" and isinstance(one, GangPlaces):
        assert len(cpus) == 1, "it is divided only where no node holds all"


@examples(100, 1000)
@given(nodes, st.integers(1, 4), st.sampled_from((0.0, 1.0, 2.0)), st.integers(1, 6), placements)
def test_equal_processes_are_placed_exactly_where_there_are_places_enough(sizes, cpus, gpus, count, placement):
    """The oracle counts: how many of them each node holds by itself."""
    gang = gang_of(job((cpus, gpus), [(count, (cpus, gpus))], placement))
    held = [min(c // cpus, int(g // gpus) if gpus else 99) for c, g in sizes]
    able = max(held) if placement == "STRICT_PACK" else sum(held)
    found = fit_gang(gang, {room: room for room in rooms_of(sizes)})
    assert isinstance(found, GangPlaces) == (able > count)  # its own process is one more
    if isinstance(found, GangPlaces) and placement == "SPREAD":
        used = Counter(room.node_id for room, _ in found.places)
        for number, most in enumerate(held):
            assert used[f"n{number}"] >= min(most, max(used.values()) - 1), "no node is left while another has two more"


@examples(60, 500)
@given(nodes, amounts, st.lists(st.tuples(st.integers(1, 3), amounts), max_size=2), st.data())
def test_nodes_are_kept_for_a_job_exactly_if_it_fits_when_others_have_ended(sizes, own, others, data):
    gang, rooms = gang_of(job(own, others, "PACK")), rooms_of(sizes)
    for room in rooms:
        for number in range(data.draw(st.integers(0, room.cpus // SHARES))):
            ends = data.draw(st.sampled_from((None, 5.0, float("inf"))))
            needs = gang.parts[0].needs._replace(cpus=SHARES, gpus=0, memory=0)
            room.hold(Allocation(float(number), f"{room.node_id}-{number}", ends, needs, ()))
    reachable = isinstance(fit_gang(gang, {room: room.lasting for room in rooms}), GangPlaces)
    kept = reserve(rooms, "job", gang, now=1.0, trusting=data.draw(st.booleans()))
    assert bool(kept) == reachable
    for reservation in kept:
        assert reservation.then.copy().hold_all(reservation.needs) is not None, "it has room there then"
    assert sorted(needs for reservation in kept for needs in reservation.needs) == (
        sorted(part.needs for part in gang.parts) if kept else []
    )
