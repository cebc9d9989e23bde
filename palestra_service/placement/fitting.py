"""Free resources of nodes: whether a process fits, and what it leaves over; `gangs` chooses the nodes of a job.

Sums are exact: CPUs and GPUs are counted in parts of 1/SHARES, memory in MiB. A fraction of a GPU is on one device, and
whole GPUs are whole devices. Within one decision free amounts only shrink.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from palestra_control.jobs import SHARES, ProcessResources, Resources

LEAST_MEMORY_GIB = 4.0  # what a job that asked for no memory may use at least


class Amounts(NamedTuple):
    """Resources as whole numbers, so that sums are exact.

    Attributes:
        cpus: in parts of 1/SHARES.
        gpus: in parts of 1/SHARES; above SHARES always a multiple of it.
    """

    cpus: int
    gpus: int
    memory: int


NOTHING = Amounts(0, 0, 0)


class GpuShare(NamedTuple):
    """A fraction of one GPU, or all of it.

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
        memory_gib: 0: unknown.
        draining: whether running jobs continue, but none starts.
        gpu_kind: such as `H100`; None: none, or unknown.
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
        """Return the node's total resources."""
        return Amounts(round(self.cpus * SHARES), self.gpus * SHARES, math.floor(self.memory_gib * 1024 + 1e-6))


class PlacedBundle(NamedTuple):
    """The node and GPUs of one process of a job's bundles."""

    node_id: str
    devices: tuple[GpuShare, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A STARTING or RUNNING job with its resources; CPUs and memory equal its needs.

    Attributes:
        submitted_at: Unix seconds.
        since: when its start was decided, Unix seconds.
        expected_end: Unix seconds; None: unknown; infinite: it runs until it is stopped.
        starting: whether it counts against the limit of starting jobs.
        beside: additionally counted for its tenant: its part of a base server, which is held on a node.
        bundles: of its further processes, in the order of `Resources.parts`.
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
        """Return what counts for its tenant."""
        return added(total(self.needs), self.beside)

    @property
    def places(self) -> Iterator[tuple[Amounts, PlacedBundle]]:
        """Yield each process's resources and node, its own process first."""
        held = (PlacedBundle(self.node_id, self.devices), *self.bundles)
        for part, place in zip(self.needs.parts, held, strict=True):
            yield counted(part), place

    def held_on(self, node_id: str) -> Amounts:
        """Return its resources on a node."""
        return added(NOTHING, *(needs for needs, place in self.places if place.node_id == node_id))


class Allocation(NamedTuple):
    """One job's resources on a node. Sorted by the start of their jobs.

    Attributes:
        ends: expected end; None: unknown; infinite: it runs until it is stopped.
    """

    since: float
    job_id: str
    ends: float | None
    needs: Amounts
    devices: tuple[GpuShare, ...]


def memory_limit_gib(needs: ProcessResources, node: Node) -> float | None:
    """Return the memory limit of a job's processes on a node, in GiB; None: the node's memory is unknown.

    It is the requested memory; without a request, the share of the node's memory that corresponds to the job's share of
    cores or GPUs, and at least `LEAST_MEMORY_GIB`, so that jobs without requests fit together.
    """
    if needs.memory_gib:
        return needs.memory_gib
    if not node.memory_gib:
        return None
    parts = [need / have for need, have in ((needs.cpus, node.cpus), (needs.gpus, node.gpus)) if have]
    return min(max(max(parts, default=0.0) * node.memory_gib, LEAST_MEMORY_GIB), node.memory_gib)


def counted(resources: ProcessResources) -> Amounts:
    """Return one process's needs, or a whole job's without bundles, in whole numbers, memory rounded up."""
    memory = math.ceil(resources.memory_gib * 1024 - 1e-6)
    return Amounts(round(resources.cpus * SHARES), round(resources.gpus * SHARES), memory)


def total(resources: Resources) -> Amounts:
    """Return the needs of all processes of a job together."""
    return added(*(counted(part) for part in resources.parts))


def added(*amounts: Amounts) -> Amounts:
    """Return the sum of at least one amount."""
    return Amounts(*map(sum, zip(*amounts, strict=True)))


def devices_for(gpus: int, free: Sequence[int], later: Sequence[int]) -> tuple[GpuShare, ...] | None:
    """Return devices that leave the least over of `later` amounts; None: the job does not fit into `free` ones."""
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
    """Return some devices of a node that a process may use; `own` are other processes of its job."""
    free = [SHARES] * node.gpus
    for place in (*own, *(place for other in running for _, place in other.places)):
        for device, share in place.devices if place.node_id == node.node_id else ():
            free[device] -= share
    return devices_for(counted(needs).gpus, free, free) or ()


class FreeResources:
    """Free resources of a node, now or at a later time.

    Attributes:
        cpus, memory, devices: free amounts, of each device separately.
        gpus: sum over the devices.
        whole: number of completely free devices.
        ordered: the devices' free amounts, ascending.
    """

    __slots__ = ("cpus", "devices", "gpus", "memory", "ordered", "whole")

    def __init__(self, cpus: int, memory: int, devices: Iterable[int]) -> None:
        self.cpus, self.memory, self.devices = cpus, memory, list(devices)
        self._count()

    def _count(self) -> None:
        self.ordered = sorted(self.devices)
        self.gpus = sum(self.ordered)
        self.whole = self.ordered.count(SHARES)

    def copy(self) -> FreeResources:
        """Return a copy that can be changed independently."""
        return FreeResources(self.cpus, self.memory, self.devices)

    def fits(self, needs: Amounts) -> bool:
        """Return whether a job fits."""
        if needs.cpus > self.cpus or needs.memory > self.memory:
            return False
        if needs.gpus < SHARES:
            return needs.gpus == 0 or (bool(self.ordered) and self.ordered[-1] >= needs.gpus)
        return self.whole * SHARES >= needs.gpus

    def give(self, needs: Amounts, devices: Sequence[GpuShare], sign: int = 1) -> None:
        """Allocate resources of a job; with `sign` -1, release them."""
        self.cpus -= sign * needs.cpus
        self.memory -= sign * needs.memory
        for device, share in devices:
            if device < len(self.devices):  # a node may come back with fewer devices
                self.devices[device] -= sign * share
        if devices:
            self._count()

    def hold_all(self, needs: Iterable[Amounts]) -> list[tuple[GpuShare, ...]] | None:
        """Allocate resources of several processes, and return their devices; None: not all of them fit."""
        found = []
        for one in needs:
            devices = devices_for(one.gpus, self.devices, self.devices) if self.fits(one) else None
            if devices is None:
                return None
            self.give(one, devices)
            found.append(devices)
        return found

    def leftover(self, needs: Amounts) -> tuple[int, ...]:
        """Return what a job would leave over, in order of importance; the smallest result fits best.

        A fraction of a GPU goes to the fullest possible device, so that whole devices stay whole. A job without GPUs
        goes to a node without any, else to one whose GPUs are in use.
        """
        cpus, memory, gpus = self.cpus - needs.cpus, self.memory - needs.memory, needs.gpus
        if gpus == 0:
            return (bool(self.devices), self.gpus, cpus, memory)
        if gpus < SHARES:
            return (self.ordered[bisect_left(self.ordered, gpus)], self.whole, self.gpus, cpus, memory)
        return (self.whole, self.gpus, cpus, memory)


class FreeOnNode(FreeResources):
    """A node on which jobs may start: its free resources, and the jobs that hold the rest."""

    __slots__ = ("capacity", "gpu_kind", "holdings", "labels", "lasting", "node_id")

    def __init__(self, node: Node) -> None:
        capacity = node.capacity
        super().__init__(capacity.cpus, capacity.memory, [SHARES] * node.gpus)
        self.node_id, self.capacity = node.node_id, capacity
        self.gpu_kind, self.labels = node.gpu_kind, node.labels
        self.holdings: list[Allocation] = []
        self.lasting = self.copy()  # what is free when all jobs that ever end have ended

    def hold(self, holding: Allocation) -> None:
        """Add a job with resources on this node."""
        self.give(holding.needs, holding.devices)
        self.holdings.append(holding)
        if holding.ends == math.inf:
            self.lasting.give(holding.needs, holding.devices)

    def could_hold(self, needs: Amounts) -> bool:
        """Return whether a job would fit on the empty node."""
        return all(need <= have for need, have in zip(needs, self.capacity, strict=True))


@dataclass(kw_only=True, slots=True)
class Reservation:
    """A node reserved for the first job that does not fit, so that no later job delays it.

    Attributes:
        then: what is free on it when the first job can start, without the job itself.
        starts_at: when that is; None: unknown.
    """

    job_id: str
    needs: tuple[Amounts, ...]
    node: FreeOnNode
    then: FreeResources
    starts_at: float | None

    def borrow(self, needs: Amounts, ends: float | None) -> tuple[GpuShare, ...] | None:
        """Return devices for a job that fits now and does not delay the first job; None: there are none."""
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
        """Record that such a job has started on the reserved node."""
        if not self.is_over(ends):
            self.then.give(needs, devices)

    def is_over(self, ends: float | None) -> bool:
        """Return whether a job with this expected end has ended when the first job can start."""
        return ends is not None and self.starts_at is not None and ends <= self.starts_at
