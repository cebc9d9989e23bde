"""What is free on which node, where a job fits best, and where it could start soonest.

Sums are exact: CPUs and GPUs are counted in parts of 1/SHARES, memory in MiB. A job runs on one node. A part of a GPU
lies on one device, and whole GPUs are whole devices. Within one decision free amounts only shrink.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from palestra.schemas.jobs import SHARES, Resources

LEAST_MEMORY_GIB = 4.0  # that a job may use which asked for none, on a node that has it


class Amounts(NamedTuple):
    """Resources, counted in whole numbers."""

    cpus: int  # in parts of 1/SHARES
    gpus: int  # in parts of 1/SHARES; above SHARES always a multiple of it
    memory: int  # MiB


class GpuShare(NamedTuple):
    """A part of one device, or all of it."""

    device: int  # its index on the node
    share: int  # in parts of 1/SHARES


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine, and whether jobs may start on it."""

    node_id: str
    cpus: float
    gpus: int  # devices, with indices from 0 on
    memory_gib: float
    alive: bool = True
    draining: bool = False  # what runs there goes on, and nothing starts

    @property
    def is_open(self) -> bool:
        """Whether jobs may start here."""
        return self.alive and not self.draining

    @property
    def capacity(self) -> Amounts:
        """All that it has."""
        return Amounts(round(self.cpus * SHARES), self.gpus * SHARES, math.floor(self.memory_gib * 1024 + 1e-6))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job that is STARTING or RUNNING, and what it holds. CPUs and memory are what it needs."""

    job_id: str
    tenant: str
    submitted_at: float
    needs: Resources
    node_id: str
    devices: tuple[GpuShare, ...]
    since: float  # when its start was decided
    expected_end: float | None = None  # None: nobody knows; infinite: it runs until somebody stops it
    starting: bool = False  # STARTING, and so one of the starts that are limited


class Holding(NamedTuple):
    """What one job holds on a node, in the order in which holders started."""

    since: float
    job_id: str
    ends: float | None  # None: nobody knows; infinite: it runs until somebody stops it
    needs: Amounts
    devices: tuple[GpuShare, ...]


def memory_limit_gib(needs: Resources, node: Node) -> float | None:
    """Return how much memory the processes of a job may use on a node, in GiB; None: the node does not say what it has.

    That is what the job asked for. One that asked for none may use the part of the node's memory that its part of the
    node's cores or GPUs is, and `LEAST_MEMORY_GIB` where that is more: jobs that all ask for none then fit beside one
    another.
    """
    if needs.memory_gib:
        return needs.memory_gib
    if not node.memory_gib:
        return None
    parts = [need / have for need, have in ((needs.cpus, node.cpus), (needs.gpus, node.gpus)) if have]
    return min(max(max(parts, default=0.0) * node.memory_gib, LEAST_MEMORY_GIB), node.memory_gib)


def counted(resources: Resources) -> Amounts:
    """What a job needs, memory rounded up."""
    memory = math.ceil(resources.memory_gib * 1024 - 1e-6)
    return Amounts(round(resources.cpus * SHARES), round(resources.gpus * SHARES), memory)


def devices_for(gpus: int, free: Sequence[int], later: Sequence[int]) -> tuple[GpuShare, ...] | None:
    """The devices on which the least is left over; None where it does not fit.

    Args:
        gpus: what is needed.
        free: what is free of each device.
        later: what will be free of each device when it matters; the scarcest are taken first.
    """
    if gpus == 0:
        return ()
    if gpus < SHARES:
        fitting = [(left, device) for device, left in enumerate(later) if free[device] >= gpus]
        return (GpuShare(min(fitting)[1], gpus),) if fitting else None
    whole = sorted((later[device], device) for device, left in enumerate(free) if left == SHARES)
    chosen = whole[: gpus // SHARES]
    return tuple(GpuShare(device, SHARES) for _, device in chosen) if len(chosen) * SHARES == gpus else None


class Room:
    """What is free: on a node now, or on a node at some time to come."""

    __slots__ = ("cpus", "devices", "gpus", "memory", "ordered", "whole")

    def __init__(self, cpus: int, memory: int, devices: Iterable[int]) -> None:
        self.cpus, self.memory, self.devices = cpus, memory, list(devices)
        self._count()

    def _count(self) -> None:
        self.ordered = sorted(self.devices)
        self.gpus = sum(self.ordered)
        self.whole = self.ordered.count(SHARES)  # devices that nobody uses

    def copy(self) -> Room:
        """The same, to be changed on its own."""
        return Room(self.cpus, self.memory, self.devices)

    def fits(self, needs: Amounts) -> bool:
        """Whether there is room for this job."""
        if needs.cpus > self.cpus or needs.memory > self.memory:
            return False
        if needs.gpus < SHARES:
            return needs.gpus == 0 or (bool(self.ordered) and self.ordered[-1] >= needs.gpus)
        return self.whole * SHARES >= needs.gpus

    def give(self, needs: Amounts, devices: Sequence[GpuShare], sign: int = 1) -> None:
        """Take away what a job will hold; with `sign` -1, give back what it held."""
        self.cpus -= sign * needs.cpus
        self.memory -= sign * needs.memory
        for device, share in devices:
            if device < len(self.devices):  # a node may come back with fewer
                self.devices[device] -= sign * share
        if devices:
            self._count()

    def leftover(self, needs: Amounts) -> tuple[int, ...]:
        """What would be left over, the dearest first; the smallest fits best.

        A part of a GPU goes to the device that it fills most, so that whole devices stay whole; a job without GPUs
        goes where there are none, then where those that there are, are in use.
        """
        cpus, memory, gpus = self.cpus - needs.cpus, self.memory - needs.memory, needs.gpus
        if gpus == 0:
            return (bool(self.devices), self.gpus, cpus, memory)
        if gpus < SHARES:
            return (self.ordered[bisect_left(self.ordered, gpus)], self.whole, self.gpus, cpus, memory)
        return (self.whole, self.gpus, cpus, memory)


class NodeRoom(Room):
    """A node on which jobs may start: what is free now, and who holds the rest."""

    __slots__ = ("_lasting", "capacity", "holdings", "node_id")

    def __init__(self, node: Node) -> None:
        capacity = node.capacity
        super().__init__(capacity.cpus, capacity.memory, [SHARES] * node.gpus)
        self.node_id, self.capacity = node.node_id, capacity
        self.holdings: list[Holding] = []
        self._lasting = self.copy()  # what is free when all that end have ended

    def hold(self, holding: Holding) -> None:
        """A job is here."""
        self.give(holding.needs, holding.devices)
        self.holdings.append(holding)
        if holding.ends == math.inf:
            self._lasting.give(holding.needs, holding.devices)

    def could_hold(self, needs: Amounts) -> bool:
        """Whether it would fit if nothing else was here."""
        return all(need <= have for need, have in zip(needs, self.capacity, strict=True))

    def will_fit(self, needs: Amounts) -> bool:
        """Whether it fits when all that end have ended."""
        return self._lasting.fits(needs)

    def soonest_by_ends(self, needs: Amounts, now: float) -> tuple[float, Room] | None:
        """When it fits if all end as expected, and what is free then; None: nobody knows."""
        ends = sorted((h.ends, h) for h in self.holdings if h.ends is not None and now < h.ends < math.inf)
        found = self._released(needs, [holding for _, holding in ends])
        return found and (found[0].ends or now, found[1])

    def soonest_by_age(self, needs: Amounts) -> tuple[float, Room] | None:
        """The start of the youngest job that must end if the oldest end first, and what is free then."""
        found = self._released(needs, sorted(h for h in self.holdings if h.ends != math.inf))
        return found and (found[0].since, found[1])

    def _released(self, needs: Amounts, order: Iterable[Holding]) -> tuple[Holding, Room] | None:
        """The holding whose end makes room, and the room."""
        if self.will_fit(needs):
            room = self.copy()
            for holding in order:
                room.give(holding.needs, holding.devices, -1)
                if room.fits(needs):
                    return holding, room
        return None


@dataclass(kw_only=True, slots=True)
class Reservation:
    """The node that is kept for the first job that does not fit, so that nothing behind it delays it."""

    job_id: str
    needs: Amounts
    node: NodeRoom
    then: Room  # what will be free on it when the job can start, the job itself not counted
    starts_at: float | None  # when that is; None: nobody knows

    def borrow(self, needs: Amounts, ends: float | None) -> tuple[GpuShare, ...] | None:
        """Devices of the kept node for a job that fits there now and does not delay the first; None: it would."""
        if self._is_over(ends):
            return devices_for(needs.gpus, self.node.devices, self.node.devices)
        devices = devices_for(needs.gpus, self.node.devices, self.then.devices)
        if devices is not None:
            room = self.then.copy()
            room.give(needs, devices)
            if room.fits(self.needs):
                return devices
        return None

    def lend(self, needs: Amounts, devices: tuple[GpuShare, ...], ends: float | None) -> None:
        """Such a job started there."""
        if not self._is_over(ends):
            self.then.give(needs, devices)

    def _is_over(self, ends: float | None) -> bool:
        """Whether a job that ends then has ended when the first can start."""
        return ends is not None and self.starts_at is not None and ends <= self.starts_at


def best_fit(rooms: Iterable[NodeRoom], needs: Amounts) -> NodeRoom | None:
    """The node on which the least is left over, the first of equals; None where it fits nowhere."""
    fitting = [room for room in rooms if room.fits(needs)]
    return min(fitting, key=lambda room: room.leftover(needs)) if fitting else None


def reserve(rooms: Iterable[NodeRoom], job_id: str, needs: Amounts, now: float, trusting: bool) -> Reservation | None:
    """Keep the node on which a job that fits nowhere can start soonest; None where ends do not help.

    With `trusting` that is by the expected ends (EASY backfill; Lifka, The ANL/IBM SP scheduling system, 1995). Where
    they say nothing, or are not trusted, it is the node whose jobs have run longest: those that have to end, counted
    from the oldest on, began before those of any other node. What starts on that node later counts as younger, so the
    choice can change only to an even older set of jobs, and that happens a limited number of times: the job gets its
    turn as long as those jobs end that are not known to be endless. Nobody waits for the end of an endless one.
    """
    nodes = list(rooms)
    if trusting:
        timed = [(soonest, node) for node in nodes if (soonest := node.soonest_by_ends(needs, now))]
        if timed:
            (at, then), node = min(timed, key=lambda found: (found[0][0], found[1].node_id))
            return Reservation(job_id=job_id, needs=needs, node=node, then=then, starts_at=at)
    aged = [(soonest, node) for node in nodes if (soonest := node.soonest_by_age(needs))]
    if aged:
        (_, then), node = min(aged, key=lambda found: (found[0][0], found[1].node_id))
        return Reservation(job_id=job_id, needs=needs, node=node, then=then, starts_at=None)
    return None
