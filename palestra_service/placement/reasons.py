"""Descriptions of why jobs do not start. Tenants read them, so they name no other tenant's job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from palestra_control.jobs import SHARES, Resources
from palestra_service.placement.fitting import NOTHING, Amounts, FreeOnNode, FreeResources, Node, added, total
from palestra_service.placement.gangs import OWN, Gang, GangPart, GangPlaces, fit_gang, gang_of
from palestra_service.placement.queues import QueueEntry, WaitingJob
from palestra_service.placement.tenants import (
    CPUS,
    GPUS,
    KINDS,
    MEMORY,
    SERVICE,
    UNITS,
    Quota,
    TenantUsage,
    format_amount,
    format_needs,
    in_units,
)

SHOWN = 3  # how many nodes a reason names


def never_starts(
    needs: Resources, nodes: Sequence[Node], tenant: str = "", quota: Quota | None = None, beside: Amounts = NOTHING
) -> str | None:
    """Return why a job can never start, even on an empty cluster; None: it can. Used to check submissions.

    Dead and draining nodes count, because they may come back. Without any node no job is refused.
    """
    over = TenantUsage(tenant, quota or Quota(), NOTHING).refusal(added(total(needs), beside))
    return gang_too_large(gang_of(needs), nodes) if over is None else with_part(over, beside)


def with_part(reason: str, beside: Amounts) -> str:
    """Add to a quota's reason what its amounts contain apart from the job's own needs."""
    return f"{reason} (with its part of a base server: {format_needs(beside)})" if any(beside) else reason


def sizes_of(nodes: Iterable[Node]) -> list[Amounts]:
    """Return the distinct sizes of nodes, ascending."""
    return sorted({node.capacity for node in nodes})


def too_large(needs: Amounts, sizes: Sequence[Amounts]) -> str | None:
    """Return why no node can hold a job, with the largest size; None: a node can."""
    if not sizes or any(within(needs, size) for size in sizes):
        return None
    for kind in (GPUS, CPUS, MEMORY):
        largest = max(size[kind] for size in sizes)
        if needs[kind] > largest:
            have = in_units(largest, UNITS[kind])
            return f"needs {format_amount(needs[kind], kind)} on one node; the largest node has {have}"
    nearest = max(sizes, key=lambda size: (sum(map(int.__le__, needs, size)), size[GPUS], size))
    return f"needs {format_needs(needs)} on one node; the nearest has {format_needs(nearest)}"


def gang_too_large(gang: Gang, nodes: Sequence[Node]) -> str | None:
    """Return why a job can never start, with the process without a node; None: it can."""
    found = fit_gang(gang, {room: room for room in map(FreeOnNode, nodes)})
    if not nodes or isinstance(found, GangPlaces):
        return None
    for part in dict.fromkeys(gang.parts):
        able = [node for node in nodes if part.may_run_on(node)]
        if not able:
            return f"needs a node with {part.wants}{_for(gang, part)}; there is none"
        if (refusal := too_large(part.needs, sizes_of(able))) is not None:
            return refusal.replace("on one node", f"on one node{_for(gang, part)}", 1)
    if gang.placement == "STRICT_PACK":
        return (
            f"needs {format_needs(gang.total)} on one node, because its placement is STRICT_PACK; no node has that, "
            "and with PACK its processes may be on several"
        )
    part = gang.parts[found.part]
    return (
        f"needs {format_needs(part.needs)} on one node{_for(gang, part)}, beside its other processes: "
        f"{_free_on(part, found.left)} left"
    )


def shortage(gang: Gang, rooms: Iterable[FreeOnNode], nodes: Sequence[Node]) -> str:
    """Describe what a job that fits nowhere now waits for, and the free resources of nodes.

    Args:
        rooms: of open nodes, at the end of a decision.
        nodes: all nodes.
    """
    open_rooms = {room: room for room in rooms}
    found = fit_gang(gang, open_rooms)
    if isinstance(found, GangPlaces):
        raise AssertionError("a job that fits does not wait for room")
    if gang.placement == "STRICT_PACK" and len(gang.parts) > 1:
        all_of_it = GangPart(OWN, gang.total, None, ())
        return f"waits for {format_needs(gang.total)} on one node (STRICT_PACK): {_free_on(all_of_it, open_rooms)} free"
    part = gang.parts[found.part]
    where = f" on a node with {part.wants}" if part.wants else ""
    if not any(part.may_run_on(room) and room.could_hold(part.needs) for room in open_rooms):
        closed = (node for node in nodes if part.may_run_on(node) and within(part.needs, node.capacity))
        if (node := next(closed, None)) is None:
            return "waits for a node: there is none"
        return f"waits for node {short(node.node_id)}, which is {'draining' if node.alive else 'not alive'}"
    return f"waits for {format_needs(part.needs)}{_of_part(gang, found.part)}{where}: {_free_on(part, found.left)} free"


def _for(gang: Gang, part: GangPart) -> str:
    """Return the process that needs something; "": the job has only one."""
    if len(gang.parts) == 1:
        return ""
    return " for its own process" if part.name == OWN else f" for each process of its {part.name} bundle"


def _of_part(gang: Gang, number: int) -> str:
    """Return the process without a node, in brackets; "": the job has only one."""
    if len(gang.parts) == 1:
        return ""
    name = gang.parts[number].name
    same = [other for other, part in enumerate(gang.parts) if part.name == name]
    which = OWN if name == OWN else f"{name} bundle {same.index(number) + 1} of {len(same)}"
    return f" ({which})"


def _free_on(part: GangPart, left: Mapping[FreeOnNode, FreeResources]) -> str:
    able = [(amounts, node) for node, amounts in left.items() if part.may_run_on(node) and node.could_hold(part.needs)]
    if not able:
        return "no such node has anything"
    able.sort(key=lambda each: (-each[0].gpus, -each[0].cpus, -each[0].memory, each[1].node_id))
    parts = []
    for amounts, node in able[:SHOWN]:
        gpus, need = amounts.gpus, part.needs.gpus
        if need:  # a fraction is on one device, and whole GPUs are whole devices
            gpus = max(amounts.devices, default=0) if need < SHARES else amounts.whole * SHARES
        free = Amounts(max(0, amounts.cpus), max(0, gpus), max(0, amounts.memory))
        none = [f" but no {KINDS[kind]}" for kind in (GPUS, CPUS) if part.needs[kind] and not free[kind] and any(free)]
        parts.append(f"node {short(node.node_id)} has {format_needs(free) or 'nothing'}{''.join(none)}")
    return ", ".join(parts)


def name_of(job: WaitingJob) -> str:
    """Return a job's name for its tenant. That of a new base server names another tenant's model."""
    return "a base server" if job.tenant == SERVICE else f"job {job.job_id}"


def behind(turn: QueueEntry, first: QueueEntry, kept: str) -> str:
    """Return why a fitting job is held back for the first one. `kept`: the reserved nodes, with their verb."""
    name = name_of(first.job) if turn.line is first.line else "a job of another tenant"
    if first.below_overdue == 0:
        text = f"behind {name} that has waited for too long"
    elif first.job.priority == turn.job.priority:
        text = f"behind {name} of the same priority"
    else:
        text = f"behind {name} of priority {first.job.priority}"
    return f"{text}: {kept} kept for it"


def within(needs: Amounts, size: Amounts) -> bool:
    """Return whether a node of this size can hold these needs."""
    return all(map(int.__le__, needs, size))


def short(node_id: str) -> str:
    """Return a node's id, shortened but recognisable."""
    return node_id[:12]
