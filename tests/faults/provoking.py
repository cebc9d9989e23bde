"""How each fault is provoked: a job's server stands still at the moment, somebody is hurt, and it goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil
from service import GAMES, LONG, lives, until

from faults.cells import DATABASE, KILL, MODEL_SERVER, NODE, RAYLET, SCHEDULER, STOP, WORKER, Cell
from faults.invariants import assert_as_if_nothing_had_happened, assert_cancelled
from faults.over_nodes import hurt_node, start_over_nodes
from faults.world import LEASE_SECONDS, LOST_ONCE, LOST_PERHAPS, NOT_LOST, WORKED, World
from palestra_control.job import Job
from palestra_service.ray.servers import PING_LIMIT_SECONDS, STUCK_SECONDS

SLOW = GAMES | {"engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.05}}
RETRIED_SECONDS = 12.0  # longer than the control store tries again
GIVEN_UP_SECONDS = 90.0  # in which a server that does not answer for 30 s is gone
ALONE_SECONDS = 5.0  # for which a job goes on without its scheduler


def play(world: World, cell: Cell) -> None:
    """Provoke a fault, wait until the job is over, and look at what it leaves."""
    worked = cell.component == WORKER
    undisturbed = world.undisturbed_worked if worked else world.undisturbed
    job = started(world, cell)
    losses = HURT[cell.component](world, cell, job)
    job.wait()
    if cell.moment.asks_to_cancel:
        assert_cancelled(world, job)
    else:
        assert_as_if_nothing_had_happened(world, job, losses, undisturbed)


def started(world: World, cell: Cell) -> Job:
    """A job that stops at the moment. Where workers play it, the one that will be hurt is the only one."""
    if cell.component == NODE:
        return start_over_nodes(world, cell)
    worked, cancelled = cell.component == WORKER, cell.moment.asks_to_cancel
    config = WORKED if worked else LONG if cancelled else SLOW if cell.component == RAYLET else GAMES
    steps = 100_000 if cancelled else 3
    machine = world.machine(cell.moment.fault(cell.component))
    job = world.service.client().submit(config | {"steps": steps}, cpus=machine.cpus)
    if worked:
        world.push_tasks(job)
        world.work(job, "--threads", "1")
    if cancelled:
        world.cancel_when_it_trains(job)
    return job


def hurt_worker(world: World, cell: Cell, job: Job) -> range:
    """It is its call that is under way, for no other one plays yet. One that was stopped comes back to find another."""
    server, victim = world.held(job), world.workers[-1]
    victim.send(cell.signal)
    server.resume()
    if cell.signal == STOP:
        time.sleep(2 * LEASE_SECONDS)
    if not cell.moment.asks_to_cancel:
        other = world.work(job)
        until(lambda: any(did["worker"] == other.log.stem for did in world.worker_log(job)), "another one plays")
        victim.send(signal.SIGCONT)
        assert other.wait(120) == 0, other.output
    job.wait()
    victim.kill()  # where it was stopped: the job may have ended without it
    return NOT_LOST


def hurt_model_server(world: World, cell: Cell, job: Job) -> range:
    server = world.held(job)
    if cell.signal == KILL:
        server.kill()
        with world.others_continue(job, server):
            job.wait()
    else:
        wait_until_given_up(world, job, server, STUCK_SECONDS if cell.moment.asks_to_cancel else PING_LIMIT_SECONDS)
    return LOST_ONCE


def wait_until_given_up(world: World, job: Job, server: psutil.Process, seconds: float) -> None:
    """A server that stands still for `seconds` is killed, and another one does its work, if there is any left."""
    with world.others_continue(job, server):
        until(lambda: not lives(server), "it is given up, and killed", GIVEN_UP_SECONDS)
        job.wait()
    said = f"did not answer for {seconds:g} s"
    assert any(said in change.reason for change in job.changes()), job.changes()


def hurt_raylet(world: World, cell: Cell, job: Job) -> range:
    """The machine is lost; the job waits for another one that is large enough."""
    server = world.held(job)
    fault = cell.moment.fault(cell.component)
    machine = world.armed.pop(fault)
    (raylet,) = (process for process in machine.node.processes() if process.name() == "raylet")
    if cell.signal == KILL:
        raylet.kill()
        server.resume()
    else:
        raylet.suspend()
        server.resume()
        until(lambda: not world.alive(machine.cpus), "Ray gives up the machine")
    other = world.add_node(machine.cpus)
    job.wait()
    machine.node.kill()
    other.kill()
    until(lambda: not world.alive(machine.cpus), "both are known to be gone")
    return LOST_PERHAPS


def hurt_scheduler(world: World, cell: Cell, job: Job) -> range:
    """The job goes on without it."""
    server, scheduler = world.held(job), world.service.processes[-1]
    if cell.signal == KILL:
        scheduler.kill()
        server.resume()
        world.service.start()
    else:
        scheduler.send(signal.SIGSTOP)
        server.resume()
        time.sleep(ALONE_SECONDS)
        scheduler.send(signal.SIGCONT)
    return NOT_LOST


def hurt_database(world: World, cell: Cell, job: Job) -> range:
    """PostgreSQL restarts all its sessions when one is killed; one that stands still is waited for."""
    server = world.held(job)
    assert world.find_writer is not None
    writer = world.find_writer()
    if cell.signal == KILL:
        writer.kill()
        server.resume()
    else:
        writer.suspend()
        server.resume()
        time.sleep(RETRIED_SECONDS)
        writer.resume()
    return NOT_LOST


HURT: dict[str, Callable[[World, Cell, Job], range]] = {  # returns how often its server may have been lost
    WORKER: hurt_worker,
    MODEL_SERVER: hurt_model_server,
    RAYLET: hurt_raylet,
    NODE: hurt_node,
    SCHEDULER: hurt_scheduler,
    DATABASE: hurt_database,
}
