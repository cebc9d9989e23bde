"""Free resources of nodes: whether a job fits, where it fits best, and where it could start soonest.

Sums are exact: CPUs and GPUs are counted in parts of 1/SHARES, memory in MiB. What is placed here is on one node;
`gangs` places jobs of several processes. A part of a GPU lies on one device, and whole GPUs are whole devices. Within
one decision free amounts only shrink.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from palestra.types.jobs import SHARES, ProcessResources, Resources

LEAST_MEMORY_GIB = 4.0  # what a job that asked for no memory may use at least


class Amounts(NamedTuple):
    """Resources, counted in whole numbers so that sums are exact.

    Attributes:
        cpus: in parts of 1/SHARES.
        gpus: in parts of 1/SHARES; above SHARES always a multiple of it.
        memory: MiB.
    """

    cpus: int
    gpus: int
    memory: int


NOTHING = Amounts(0, 0, 0)


class GpuShare(NamedTuple):
    """A part of one GPU, or all of it.

    Attributes:
        device: its index on the node.
        share: in parts of 1/SHARES.
    """

    device: int
    share: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of the cluster, and whether jobs may start on it.

    Attributes:
        node_id: unique in the cluster.
        cpus: cores.
        gpus: number of devices, with indices from 0 on.
        memory_gib: memory; 0: not known.
        alive: whether the node answers.
        draining: whether running jobs go on, but none starts.
        gpu_kind: of its devices, such as `H100`; None: it has none, or it is not known.
        labels: that the operator has given it.
    """

    node_id: str
    cpus: float
    gpus: int
    memory_gib: float
    alive: bool = True
    draining: bool = False
    gpu_kind: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_open(self) -> bool:
        """Return whether jobs may start on this node."""
        return self.alive and not self.draining

    @property
    def capacity(self) -> Amounts:
        """Return everything that the node has."""
        return Amounts(round(self.cpus * SHARES), self.gpus * SHARES, math.floor(self.memory_gib * 1024 + 1e-6))


class PlacedBundle(NamedTuple):
    """Where one process of a job's bundles is, and the GPUs that it holds there.

    Attributes:
        node_id: of its node.
        devices: GPUs that it holds; CPUs and memory are those that it needs.
    """

    node_id: str
    devices: tuple[GpuShare, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job that is STARTING or RUNNING, with what it holds. It holds CPUs and memory as it needs.

    Attributes:
        job_id: of the job.
        tenant: the owner's.
        submitted_at: Unix seconds.
        needs: resources that it asked for.
        node_id: where its own process runs.
        devices: GPUs that its own process holds.
        since: when its start was decided, Unix seconds.
        expected_end: Unix seconds; None: unknown; infinite: it runs until it is stopped.
        starting: whether it is STARTING, so that it counts as one of the limited starts.
        beside: counted for its tenant beside its needs: its part of a base server, which holds it on a node.
        bundles: where the processes of its bundles are, in the order of `Resources.parts`.
    """

    job_id: str
    tenant: str
    submitted_at: float
    needs: Resources
    node_id: str
    devices: tuple[GpuShare, ...]
    since: float
    expected_end: float | None = None
    starting: bool = False
    beside: Amounts = NOTHING
    bundles: tuple[PlacedBundle, ...] = ()

    @property
    def counts(self) -> Amounts:
        """Return what is counted for its tenant."""
        return added(total(self.needs), self.beside)

    @property
    def places(self) -> Iterator[tuple[Amounts, PlacedBundle]]:
        """Yield what each of its processes holds, and where, its own process first."""
        held = (PlacedBundle(self.node_id, self.devices), *self.bundles)
        for part, place in zip(self.needs.parts, held, strict=True):
            yield counted(part), place

    def held_on(self, node_id: str) -> Amounts:
        """Return what it holds on a node."""
        return added(NOTHING, *(needs for needs, place in self.places if place.node_id == node_id))


class Allocation(NamedTuple):
    """The resources that one job holds on a node. Holdings sort by the start of their jobs.

    Attributes:
        since: when the job's start was decided.
        job_id: of the job.
        ends: expected end; None: unknown; infinite: it runs until it is stopped.
        needs: CPUs and memory that it holds.
        devices: GPUs that it holds.
    """

    since: float
    job_id: str
    ends: float | None
    needs: Amounts
    devices: tuple[GpuShare, ...]


def memory_limit_gib(needs: ProcessResources, node: Node) -> float | None:
    """Return how much memory a job's processes may use on a node, in GiB; None: the node's memory is not known.

    A job that asked for memory may use that much. A job that asked for none may use the share of the node's memory that
    its share of the node's cores or GPUs is, and at least `LEAST_MEMORY_GIB`, so that jobs which all ask for none fit
    beside one another.
    """
    if needs.memory_gib:
        return needs.memory_gib
    if not node.memory_gib:
        return None
    parts = [need / have for need, have in ((needs.cpus, node.cpus), (needs.gpus, node.gpus)) if have]
    return min(max(max(parts, default=0.0) * node.memory_gib, LEAST_MEMORY_GIB), node.memory_gib)


def counted(resources: ProcessResources) -> Amounts:
    """Return what one process needs, or all of a job without bundles, in whole numbers, memory rounded up."""
    memory = math.ceil(resources.memory_gib * 1024 - 1e-6)
    return Amounts(round(resources.cpus * SHARES), round(resources.gpus * SHARES), memory)


def total(resources: Resources) -> Amounts:
    """Return what all processes of a job need together."""
    return added(*(counted(part) for part in resources.parts))


def added(*amounts: Amounts) -> Amounts:
    """Return the sum of amounts, of which there is at least one."""
    return Amounts(*map(sum, zip(*amounts, strict=True)))


def devices_for(gpus: int, free: Sequence[int], later: Sequence[int]) -> tuple[GpuShare, ...] | None:
    """Return the devices for a job, chosen so that the least is left over; None: the job does not fit.

    Args:
        free: what is free of each device now.
        later: what will be free of each device at the time that matters; the scarcest are taken first.
    """
    if gpus == 0:
        return ()
    if gpus < SHARES:
        fitting = [(left, device) for device, left in enumerate(later) if free[device] >= gpus]
        return (GpuShare(min(fitting)[1], gpus),) if fitting else None
    whole = sorted((later[device], device) for device, left in enumerate(free) if left == SHARES)
    chosen = whole[: gpus // SHARES]
    return tuple(GpuShare(device, SHARES) for _, device in chosen) if len(chosen) * SHARES == gpus else None


def devices_left(
    node: Node, needs: ProcessResources, running: Iterable[RunningJob], own: Iterable[PlacedBundle] = ()
) -> tuple[GpuShare, ...]:
    """Return devices of a node for something that holds as many as it needs; which ones is not known.

    Args:
        own: places of other processes of the same job.
    """
    free = [SHARES] * node.gpus
    for place in (*own, *(place for other in running for _, place in other.places)):
        for device, share in place.devices if place.node_id == node.node_id else ():
            free[device] -= share
    return devices_for(counted(needs).gpus, free, free) or ()


class FreeResources:
    """Free resources: of a node now, or of a node at a later time.

    Attributes:
        cpus, memory, devices: free amounts, of each device separately.
        gpus: sum over the devices.
        whole: number of devices that are wholly free.
        ordered: the devices' free amounts, ascending.
    """

    __slots__ = ("cpus", "devices", "gpus", "memory", "ordered", "whole")

    def __init__(self, cpus: int, memory: int, devices: Iterable[int]) -> None:
        self.cpus, self.memory, self.devices = cpus, memory, list(devices)
        self._count()

    def _count(self) -> None:
        """Compute the sums again, after devices have changed."""
        self.ordered = sorted(self.devices)
        self.gpus = sum(self.ordered)
        self.whole = self.ordered.count(SHARES)

    def copy(self) -> FreeResources:
        """Return a copy that can be changed independently."""
        return FreeResources(self.cpus, self.memory, self.devices)

    def fits(self, needs: Amounts) -> bool:
        """Return whether there are enough free resources for a job."""
        if needs.cpus > self.cpus or needs.memory > self.memory:
            return False
        if needs.gpus < SHARES:
            return needs.gpus == 0 or (bool(self.ordered) and self.ordered[-1] >= needs.gpus)
        return self.whole * SHARES >= needs.gpus

    def give(self, needs: Amounts, devices: Sequence[GpuShare], sign: int = 1) -> None:
        """Take resources away that a job will hold; with `sign` -1, give back what it held.

        Args:
            sign: 1 or -1.
        """
        self.cpus -= sign * needs.cpus
        self.memory -= sign * needs.memory
        for device, share in devices:
            if device < len(self.devices):  # a node may come back with fewer devices
                self.devices[device] -= sign * share
        if devices:
            self._count()

    def hold_all(self, needs: Iterable[Amounts]) -> list[tuple[GpuShare, ...]] | None:
        """Take resources away for several processes, and return their devices; None: not all of them fit."""
        found = []
        for one in needs:
            devices = devices_for(one.gpus, self.devices, self.devices) if self.fits(one) else None
            if devices is None:
                return None
            self.give(one, devices)
            found.append(devices)
        return found

    def leftover(self, needs: Amounts) -> tuple[int, ...]:
        """Return what would be left over after a job starts, in order of importance; the smallest result fits best.

        A part of a GPU goes to the device that it fills most, so that whole devices stay whole. A job without GPUs goes
        to a node without any, else to one whose GPUs are in use.
        """
        cpus, memory, gpus = self.cpus - needs.cpus, self.memory - needs.memory, needs.gpus
        if gpus == 0:
            return (bool(self.devices), self.gpus, cpus, memory)
        if gpus < SHARES:
            return (self.ordered[bisect_left(self.ordered, gpus)], self.whole, self.gpus, cpus, memory)
        return (self.whole, self.gpus, cpus, memory)


class FreeOnNode(FreeResources):
    """A node on which jobs may start: what is free now, and which jobs hold the rest."""

    __slots__ = ("capacity", "gpu_kind", "holdings", "labels", "lasting", "node_id")

    def __init__(self, node: Node) -> None:
        capacity = node.capacity
        super().__init__(capacity.cpus, capacity.memory, [SHARES] * node.gpus)
        self.node_id, self.capacity = node.node_id, capacity
        self.gpu_kind, self.labels = node.gpu_kind, node.labels
        self.holdings: list[Allocation] = []
        self.lasting = self.copy()  # what is free when all jobs that ever end have ended

    def hold(self, holding: Allocation) -> None:
        """Add a job that holds resources on this node."""
        self.give(holding.needs, holding.devices)
        self.holdings.append(holding)
        if holding.ends == math.inf:
            self.lasting.give(holding.needs, holding.devices)

    def could_hold(self, needs: Amounts) -> bool:
        """Return whether a job would fit if the node was empty."""
        return all(need <= have for need, have in zip(needs, self.capacity, strict=True))

    def will_fit(self, needs: Amounts) -> bool:
        """Return whether a job fits when all jobs that ever end have ended."""
        return self.lasting.fits(needs)

    def soonest_by_ends(self, needs: Amounts, now: float) -> tuple[float, FreeResources] | None:
        """Return when a job fits if all others end as expected, and what is free then.

        None: the expected ends do not tell.
        """
        ends = sorted((h.ends, h) for h in self.holdings if h.ends is not None and now < h.ends < math.inf)
        found = self._released(needs, [holding for _, holding in ends])
        return found and (found[0].ends or now, found[1])

    def soonest_by_age(self, needs: Amounts) -> tuple[float, FreeResources] | None:
        """Return the start of the youngest job that has to end if the oldest end first, and what is free then.

        None: the job does not fit even when all jobs that ever end have ended.
        """
        found = self._released(needs, sorted(h for h in self.holdings if h.ends != math.inf))
        return found and (found[0].since, found[1])

    def _released(self, needs: Amounts, order: Iterable[Allocation]) -> tuple[Allocation, FreeResources] | None:
        """Return the first holding in `order` whose end makes room for a job, and the free resources then.

        None: none does.
        """
        if self.will_fit(needs):
            room = self.copy()
            for holding in order:
                room.give(holding.needs, holding.devices, -1)
                if room.fits(needs):
                    return holding, room
        return None


@dataclass(kw_only=True, slots=True)
class Reservation:
    """A node that is kept for the first job that does not fit, so that no later job delays it.

    Attributes:
        job_id: of the first job.
        needs: of each of its processes that are to be on this node.
        node: the kept node.
        then: what will be free on it when the first job can start, without the job itself.
        starts_at: when that is; None: unknown.
    """

    job_id: str
    needs: tuple[Amounts, ...]
    node: FreeOnNode
    then: FreeResources
    starts_at: float | None

    def borrow(self, needs: Amounts, ends: float | None) -> tuple[GpuShare, ...] | None:
        """Return devices of the kept node for a job that fits there now and does not delay the first job.

        None: it would.

        Args:
            ends: its expected end; None: unknown.
        """
        if self.is_over(ends):
            return devices_for(needs.gpus, self.node.devices, self.node.devices)
        devices = devices_for(needs.gpus, self.node.devices, self.then.devices)
        if devices is not None:
            room = self.then.copy()
            room.give(needs, devices)
            if room.hold_all(self.needs) is not None:
                return devices
        return None

    def lend(self, needs: Amounts, devices: tuple[GpuShare, ...], ends: float | None) -> None:
        """Record that such a job started on the kept node.

        Args:
            ends: its expected end; None: unknown.
        """
        if not self.is_over(ends):
            self.then.give(needs, devices)

    def is_over(self, ends: float | None) -> bool:
        """Return whether a job with this expected end has ended when the first job can start."""
        return ends is not None and self.starts_at is not None and ends <= self.starts_at


def best_fit(rooms: Iterable[FreeOnNode], needs: Amounts) -> FreeOnNode | None:
    """Return the node on which a job leaves the least over, the first of equal ones; None: it fits nowhere."""
    fitting = [room for room in rooms if room.fits(needs)]
    return min(fitting, key=lambda room: room.leftover(needs)) if fitting else None


def reserve(rooms: Iterable[FreeOnNode], job_id: str, needs: Amounts, now: float, trusting: bool) -> Reservation | None:
    """Keep the node on which a job that fits nowhere can start soonest; None: no end of a job makes room.

    With `trusting` the node is chosen by the expected ends (EASY backfill; Lifka, The ANL/IBM SP scheduling system,
    1995). If they say nothing, or are not trusted, it is the node whose jobs have run longest: the jobs that have to
    end, counted from the oldest on, began before those of any other node. A job that starts on that node later counts
    as younger, so the choice can only change to an even older set of jobs, which happens a limited number of times. So
    the job starts at last, as long as jobs end that are not known to be endless. The end of an endless job is never
    waited for.

    Args:
        rooms: the nodes on which jobs may start.
        now: Unix seconds.
        trusting: whether expected ends are used.
    """
    nodes = list(rooms)
    if trusting:
        timed = [(soonest, node) for node in nodes if (soonest := node.soonest_by_ends(needs, now))]
        if timed:
            (at, then), node = min(timed, key=lambda found: (found[0][0], found[1].node_id))
            return Reservation(job_id=job_id, needs=(needs,), node=node, then=then, starts_at=at)
    aged = [(soonest, node) for node in nodes if (soonest := node.soonest_by_age(needs))]
    if aged:
        (_, then), node = min(aged, key=lambda found: (found[0][0], found[1].node_id))
        return Reservation(job_id=job_id, needs=(needs,), node=node, then=then, starts_at=None)
    return None
