"""Why a job does not start, in words. A tenant reads them, so they name no job of another tenant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice

from palestra.scheduler.fitting import Amounts, Node, NodeRoom, counted
from palestra.scheduler.tenants import CPUS, GPUS, MEMORY, UNITS, Account, Quota, told, told_needs, told_one
from palestra.scheduler.turns import Turn, WaitingJob
from palestra.schemas.jobs import SHARES, Resources

SHOWN = 3  # nodes that are named


def refusal(needs: Resources, nodes: Sequence[Node], tenant: str = "", quota: Quota | None = None) -> str | None:
    """Why a job can never start, not even when all else is over; None: it can. For whoever takes jobs.

    Nodes that are dead or draining count, for they may come back. Without any node nothing is refused.
    """
    amounts, nothing = counted(needs), Amounts(0, 0, 0)
    return Account(tenant, quota or Quota(), nothing).refusal(amounts) or too_large(amounts, sizes_of(nodes))


def sizes_of(nodes: Iterable[Node]) -> list[Amounts]:
    """The different sizes of nodes."""
    return sorted({node.capacity for node in nodes})


def too_large(needs: Amounts, sizes: Sequence[Amounts]) -> str | None:
    """Why no node could hold it, with the largest that there is; None: one could."""
    if not sizes or any(_within(needs, size) for size in sizes):
        return None
    for kind in (GPUS, CPUS, MEMORY):
        largest = max(size[kind] for size in sizes)
        if needs[kind] > largest:
            have = told(largest, UNITS[kind])
            return f"needs {told_one(needs[kind], kind)} on one node; the largest node has {have}"
    nearest = max(sizes, key=lambda size: (sum(map(int.__le__, needs, size)), size[GPUS], size))
    return f"needs {told_needs(needs)} on one node; the nearest has {told_needs(nearest)}"


def name_of(job: WaitingJob) -> str:
    """Return what other users of a job's tenant are told of it."""
    return "a private job" if job.private else f"job {job.job_id}"


def behind(turn: Turn, first: Turn, node_id: str | None) -> str:
    """A job would fit, but another one is first; `node_id` is the node that is kept for that one."""
    name = name_of(first.job) if turn.line is first.line else "a job of another tenant"
    if first.below_overdue == 0:
        text = f"behind {name} that has waited for too long"
    elif first.job.priority == turn.job.priority:
        text = f"behind {name} of the same priority"
    else:
        text = f"behind {name} of priority {first.job.priority}"
    return text if node_id is None else f"{text}: node {short(node_id)} is kept for it"


class Shortage:
    """What is free at the end of a decision, the most first."""

    def __init__(self, rooms: Sequence[NodeRoom], nodes: Sequence[Node]) -> None:
        """`rooms` are the nodes on which jobs may start; `nodes` are all."""
        self._rooms, self._nodes = rooms, sorted(nodes, key=lambda node: node.node_id)

    @cached_property
    def _by_cpus(self) -> list[tuple[int, NodeRoom]]:
        return _most_first((room.cpus, room) for room in self._rooms)

    @cached_property
    def _by_memory(self) -> list[tuple[int, NodeRoom]]:
        return _most_first((room.memory, room) for room in self._rooms)

    @cached_property
    def _by_whole_gpus(self) -> list[tuple[int, NodeRoom]]:
        return _most_first((room.whole * SHARES, room) for room in self._rooms)

    @cached_property
    def _by_largest_part(self) -> list[tuple[int, NodeRoom]]:
        return _most_first((max(room.devices, default=0), room) for room in self._rooms)

    def _by(self, kind: int, needs: Amounts) -> list[tuple[int, NodeRoom]]:
        if kind == GPUS:
            return self._by_largest_part if needs.gpus < SHARES else self._by_whole_gpus
        return self._by_cpus if kind == CPUS else self._by_memory

    def told(self, needs: Amounts) -> str:
        """What a job waits for that fits nowhere now: `waits for 2 GPUs: node a has 1 free, node b 0`."""
        for kind in (GPUS, CPUS, MEMORY):
            able = ((free, room) for free, room in self._by(kind, needs) if room.could_hold(needs))
            seen = list(islice(able, SHOWN + 1))
            if not seen:
                return self._closed(needs)
            if needs[kind] > max(0, seen[0][0]):
                parts = [f"node {short(room.node_id)} {told(max(0, free), UNITS[kind])}" for free, room in seen[:SHOWN]]
                first = parts[0].rpartition(" ")
                parts[0] = f"{first[0]} has {first[2]} free"
                rest = ", and no other has more" if len(seen) > SHOWN else ""
                return f"waits for {told_one(needs[kind], kind)}: {', '.join(parts)}{rest}"
        kind = GPUS if needs.gpus else CPUS
        room = next(room for _, room in self._by(kind, needs) if room.could_hold(needs))
        free = Amounts(room.cpus, room.whole * SHARES or max(room.devices, default=0), room.memory)
        return f"waits for {told_needs(needs)} on one node: node {short(room.node_id)} has {told_needs(free)} free"

    def _closed(self, needs: Amounts) -> str:
        """Only nodes on which nothing may start could hold it."""
        for node in self._nodes:
            if _within(needs, node.capacity):
                return f"waits for node {short(node.node_id)}, which is {'draining' if node.alive else 'not alive'}"
        return "waits for a node: there is none"


def _within(needs: Amounts, size: Amounts) -> bool:
    return all(map(int.__le__, needs, size))


def _most_first(rooms: Iterable[tuple[int, NodeRoom]]) -> list[tuple[int, NodeRoom]]:
    return sorted(rooms, key=lambda pair: (-pair[0], pair[1].node_id))


def short(node_id: str) -> str:
    """As much of a node's id as tells it from others."""
    return node_id[:12]
