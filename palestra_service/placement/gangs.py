"""The nodes of a job's processes, which start together or not at all: now, and where the job could start soonest.

A single process goes where it leaves the least over. Of several, `STRICT_PACK` puts all on one node. `PACK` does so if
possible, and otherwise fills one node after another, first the one that holds most of the remaining processes. `SPREAD`
gives each process to the node with the fewest of the job, and packs them if that leaves one without a node. Processes
with labels are placed first, and larger ones before smaller ones. This is a bin-packing heuristic, like Ray's: a job
may be refused although an arrangement exists.

With P processes and N nodes a placement takes O(P P N) at most, and O(P N) if one node holds all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from palestra_control.jobs import Placement, ProcessResources, Resources
from palestra_service.placement.fitting import (
    Allocation,
    Amounts,
    FreeOnNode,
    FreeResources,
    GpuShare,
    Node,
    Reservation,
    added,
    counted,
    devices_for,
)

OWN = "own process"
Free = Mapping[FreeOnNode, FreeResources]


class GangPart(NamedTuple):
    """One process of a job.

    Attributes:
        name: for people: the role of its bundle, or `OWN`.
        gpu_kind: required of its node; None: any.
        labels: required of its node, as pairs.
    """

    name: str
    needs: Amounts
    gpu_kind: str | None
    labels: tuple[tuple[str, str], ...]

    def may_run_on(self, node: Node | FreeOnNode) -> bool:
        """Return whether a node has the labels and the kind of GPU that this process needs."""
        return self.gpu_kind in (None, node.gpu_kind) and all(
            node.labels.get(name) == value for name, value in self.labels
        )

    @property
    def wants(self) -> str:
        """Describe the labels; "": none."""
        kind = [] if self.gpu_kind is None else [f"GPUs of kind {self.gpu_kind}"]
        return " and ".join([*kind, *(f"label {name} = {value}" for name, value in self.labels)])


class Gang(NamedTuple):
    """The processes of one job.

    Attributes:
        parts: its own process first, then its bundles', as in `Resources.parts`.
    """

    parts: tuple[GangPart, ...]
    placement: Placement

    @property
    def total(self) -> Amounts:
        """Return the needs of all processes together."""
        return added(*(part.needs for part in self.parts))


@dataclass(frozen=True, slots=True)
class GangPlaces:
    """The node of each process of a job, in the order of `Gang.parts`."""

    places: tuple[tuple[FreeOnNode, tuple[GpuShare, ...]], ...]


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The process of a job that found no node."""

    part: int
    left: Free


def gang_of(resources: Resources) -> Gang:
    """Return the processes of a job."""
    names = [OWN, *(bundle.role for bundle in resources.bundles for _ in range(bundle.count))]
    parts = tuple(_part(name, one) for name, one in zip(names, resources.parts, strict=True))
    return Gang(parts, resources.placement)


def _part(name: str, needs: ProcessResources) -> GangPart:
    return GangPart(name, counted(needs), needs.gpu_kind, tuple(sorted(needs.labels.items())))


def fit_gang(gang: Gang, free: Free) -> GangPlaces | NoRoom:
    """Return the nodes of a job's processes, or the process that finds none. The first of equal nodes is used."""
    if len(gang.parts) == 1:
        return _placed_alone(gang.parts[0], free)
    order = sorted(range(len(gang.parts)), key=lambda number: (_turn(gang.parts[number]), -number), reverse=True)
    if gang.placement == "SPREAD":
        spread = _placed_by(_least_used, gang, order, free)
        return spread if isinstance(spread, GangPlaces) else _placed_by(_fewest_nodes, gang, order, free)
    whole = _on_one_node(gang, order, free)
    if whole is not None:
        return whole
    packed = _placed_by(_fewest_nodes, gang, order, free)
    if gang.placement == "STRICT_PACK" and isinstance(packed, GangPlaces):
        return NoRoom(0, free)
    return packed


def _placed_alone(part: GangPart, free: Free) -> GangPlaces | NoRoom:
    node = min(_able(part, free), key=lambda node: free[node].leftover(part.needs), default=None)
    devices = None if node is None else devices_for(part.needs.gpus, free[node].devices, free[node].devices)
    return NoRoom(0, free) if node is None or devices is None else GangPlaces(((node, devices),))


def _turn(part: GangPart) -> tuple[bool, tuple[int, int, int]]:
    """Return the sort key of a process, largest first: restricted processes, then by size."""
    return bool(part.wants), _size(part.needs)


def _size(needs: Amounts) -> tuple[int, int, int]:
    return needs.gpus, needs.cpus, needs.memory


def _on_one_node(gang: Gang, order: Sequence[int], free: Free) -> GangPlaces | None:
    """Return places on the node with the least left over; None: no node holds all."""
    found: dict[FreeOnNode, list[tuple[GpuShare, ...]]] = {}
    for node, amounts in free.items():
        if all(part.may_run_on(node) for part in gang.parts):
            devices = amounts.copy().hold_all(gang.parts[number].needs for number in order)
            if devices is not None:
                found[node] = devices
    if not found:
        return None
    total = gang.total
    best = min(found, key=lambda node: (free[node].gpus - total.gpus, free[node].cpus - total.cpus))
    by_number = dict(zip(order, found[best], strict=True))
    return GangPlaces(tuple((best, by_number[number]) for number in range(len(order))))


_Choose = Callable[[GangPart, list[GangPart], Free, Counter[FreeOnNode]], FreeOnNode | None]


def _placed_by(choose: _Choose, gang: Gang, order: Sequence[int], free: Free) -> GangPlaces | NoRoom:
    left = {node: amounts.copy() for node, amounts in free.items()}
    used: Counter[FreeOnNode] = Counter()
    places: dict[int, tuple[FreeOnNode, tuple[GpuShare, ...]]] = {}
    for turn, number in enumerate(order):
        part = gang.parts[number]
        node = choose(part, [gang.parts[later] for later in order[turn:]], left, used)
        if node is None:
            return NoRoom(number, left)
        devices = devices_for(part.needs.gpus, left[node].devices, left[node].devices)
        assert devices is not None
        left[node].give(part.needs, devices)
        used[node] += 1
        places[number] = node, devices
    return GangPlaces(tuple(places[number] for number in range(len(order))))


def _able(part: GangPart, left: Free) -> list[FreeOnNode]:
    return [node for node, amounts in left.items() if part.may_run_on(node) and amounts.fits(part.needs)]


def _least_used(part: GangPart, later: list[GangPart], left: Free, used: Counter[FreeOnNode]) -> FreeOnNode | None:
    """Return the node with the fewest processes of the job, then with the least left over."""
    return min(_able(part, left), key=lambda node: (used[node], left[node].leftover(part.needs)), default=None)


def _fewest_nodes(part: GangPart, later: list[GangPart], left: Free, used: Counter[FreeOnNode]) -> FreeOnNode | None:
    """Return a node that has processes of the job; else the one that holds most of the remaining ones."""
    able = _able(part, left)
    known = [node for node in able if used[node]]
    if known:
        return min(known, key=lambda node: left[node].leftover(part.needs))
    alike = [(one, len(list(same))) for one, same in groupby(later)]

    def held(node: FreeOnNode) -> int:
        amounts, count = left[node].copy(), 0
        for one, number in alike:
            if one.may_run_on(node):
                for _ in range(number):
                    if amounts.hold_all((one.needs,)) is None:
                        break  # nor is there room for others of this size
                    count += 1
        return count

    return min(able, key=lambda node: (-held(node), left[node].leftover(part.needs)), default=None)


def reserve(
    rooms: Iterable[FreeOnNode], job_id: str, gang: Gang, now: float, trusting: bool
) -> tuple[Reservation, ...]:
    """Reserve the nodes on which a job that fits nowhere can start soonest; (): no end of a job helps.

    With `trusting` jobs are assumed to end in the order of their expected ends (EASY backfill; Lifka, The ANL/IBM SP
    scheduling system, 1995), and the smallest sufficient number of them is used. If the ends are unknown or not
    trusted, it is from the oldest job on: a job that starts on a reserved node later counts as younger, so the choice
    can only change to an even older set of jobs, which happens a limited number of times. So the job eventually starts
    if jobs end that are not known to be endless, which are never waited for.
    """
    nodes = list(rooms)
    holdings = [(holding, node) for node in nodes for holding in node.holdings if holding.ends != math.inf]
    if trusting:
        ends = ((one.ends, one, node) for one, node in holdings if one.ends is not None and one.ends > now)
        timed = sorted(ends, key=lambda each: (each[0], each[1], each[2].node_id))
        found = _soonest(nodes, gang, [(holding, node) for _, holding, node in timed])
        if found is not None:
            count, then, places = found
            return _kept(job_id, gang, then, places, timed[count - 1][0] if count else now)
    found = _soonest(nodes, gang, sorted(holdings, key=lambda each: (each[0], each[1].node_id)))
    return () if found is None else _kept(job_id, gang, found[1], found[2], None)


def _soonest(
    nodes: Sequence[FreeOnNode], gang: Gang, order: Sequence[tuple[Allocation, FreeOnNode]]
) -> tuple[int, Free, GangPlaces] | None:
    """Return how many jobs must end, what is free then, and where the job goes; None: it never fits."""
    after = partial(_after, nodes, order)
    low, high = 0, len(order)
    if isinstance(fit_gang(gang, after(high)), NoRoom):
        return None
    while low < high:
        middle = (low + high) // 2
        if isinstance(fit_gang(gang, after(middle)), GangPlaces):
            high = middle
        else:
            low = middle + 1
    then = after(low)
    places = fit_gang(gang, then)
    return (low, then, places) if isinstance(places, GangPlaces) else None


def _after(nodes: Sequence[FreeOnNode], order: Sequence[tuple[Allocation, FreeOnNode]], count: int) -> Free:
    free = {node: node.copy() for node in nodes}
    for holding, node in order[:count]:
        free[node].give(holding.needs, holding.devices, -1)
    return free


def _kept(job_id: str, gang: Gang, then: Free, places: GangPlaces, at: float | None) -> tuple[Reservation, ...]:
    needs: dict[FreeOnNode, list[Amounts]] = {}
    for part, (node, _) in zip(gang.parts, places.places, strict=True):
        needs.setdefault(node, []).append(part.needs)
    return tuple(
        Reservation(
            job_id=job_id,
            needs=tuple(sorted(parts, key=_size, reverse=True)),
            node=node,
            then=then[node],
            starts_at=at,
        )
        for node, parts in needs.items()
    )
