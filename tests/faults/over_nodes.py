"""A job over two machines, of which the one is lost that does not have the job's own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
from service import GAMES, LONG, until

from faults.cells import KILL, Cell
from faults.standing import others_continue, stopped
from faults.world import LOST_ONCE, NOT_LOST, Machine, World
from palestra_control.job import Job

FAR = "part=far"
LOST_CPUS, OTHER_CPUS = 3, 4  # of the machine that is lost, and of that in its place: too few for the job's own process
POOL = {"engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.05, "replicas": 2}}
BUNDLES: list[dict[str, Any]] = [
    {"role": "engine", "cpus": 1, "labels": {"part": "far"}},
    {"role": "runner", "cpus": 1, "labels": {"part": "far"}},
]


def start_over_nodes(world: World, cell: Cell) -> Job:
    """Start a job whose own process is on a machine that is armed, and all others on one that is armed as well."""
    fault, cancelled = cell.moment.fault(cell.component), cell.moment.asks_to_cancel
    machine = world.machine(fault)
    if world.far is not None:  # of a cell that has failed
        world.far.node.kill()
        until(lambda: not world.alive(LOST_CPUS), "it is known to be gone")
    world.far = Machine(world.add_node(LOST_CPUS, fault, FAR), LOST_CPUS)
    config = (LONG if cancelled else GAMES) | POOL | {"environment": {**GAMES["environment"], "runners": 1}}
    job = world.service.client().submit(config, cpus=machine.cpus, bundles=BUNDLES)
    if cancelled:
        world.cancel_when_it_trains(job)
    return job


def hurt_node(world: World, cell: Cell, job: Job) -> range:
    """Lose the machine of a job's bundles. Another one takes its place, which is not armed."""
    machine, lost = world.machine(cell.moment.fault(cell.component)), world.far
    assert lost is not None

    def there() -> Iterator[psutil.Process]:
        yield from (*machine.node.processes(), *lost.node.processes())

    until(lambda: next(stopped(there), None), f"it stops {cell.moment.name}", 120)
    if cell.signal == KILL:
        lost.node.kill()
    else:
        lost.node.stop()
    with others_continue(machine.node.processes, None, 0.5):
        until(lambda: not world.alive(lost.cpus), "Ray gives up the machine")
        other = world.add_node(OTHER_CPUS, labels=FAR)
        job.wait()
    world.far = None
    for node in (lost.node, other):
        node.kill()
    until(lambda: not world.alive(OTHER_CPUS), "it is known to be gone")
    return NOT_LOST if cell.moment.asks_to_cancel else LOST_ONCE
