"""A cluster whose machines can be armed, its control plane, and jobs that nothing disturbed."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from nodes import Node, Nodes
from servers import HERE, SCRIPTED, Process
from servers import Job as Folder
from service import GAMES, Service, until

from faults.standing import others_continue, stopped
from palestra_control.job import Job

CPUS, GPUS = 6, 2
LEASE_SECONDS = 3.0
TASKS = [{"text": f"task {i}"} for i in range(7)]
HELD_OUT = [{"text": f"held out {i}"} for i in range(2)]
WORKED = SCRIPTED | {  # a job that workers play
    "rollout": {**SCRIPTED["rollout"], "lease_seconds": LEASE_SECONDS, "max_attempts": 9},
    "checkpoint": {"every_steps": 1},
}
NOT_LOST, LOST_ONCE, LOST_PERHAPS = range(1), range(1, 2), range(2)  # how often a job's server is gone


@dataclass
class Machine:
    """A node, and how a job gets there, or how it is found: no other node that lives has so many CPUs."""

    node: Node
    cpus: int


@dataclass
class World:
    """What the faults happen in."""

    nodes: Nodes
    service: Service
    find_writer: Callable[[], psutil.Process] | None = None  # the database's process for the scheduler's session
    armed: dict[str, Machine] = field(default_factory=dict)  # by the fault
    far: Machine | None = None  # that has all processes but one of a job over two machines
    busy: set[int] = field(default_factory=set)  # CPUs of machines on which something else is going on
    workers: list[Process] = field(default_factory=list)

    # Jobs

    def folder(self, job: Job, steps: int = 3) -> Folder:
        """What a job leaves, and what its workers say."""
        where = self.service.state / "jobs" / job.job_id
        return Folder(where, GAMES | {"steps": steps}, tasks=(), validation=())

    def checkpoints(self, job: Job) -> Path:
        return self.service.state / "jobs" / job.job_id / "run" / "checkpoints"

    def job_over(self, config: Mapping[str, Any], **more: Any) -> Job:
        job = self.service.client().submit(config, **more)
        assert job.wait().state == "completed", job.view()
        return job

    def cancel_when_it_trains(self, job: Job) -> None:
        until(lambda: (self.checkpoints(job) / "step-000001").exists(), "it trains")
        job.cancel()

    @functools.cached_property
    def undisturbed(self) -> Folder:
        """Of a job that plays itself."""
        return self.folder(self.job_over(GAMES, gpus=1))  # only the first machine has any, and it is not armed

    @functools.cached_property
    def undisturbed_worked(self) -> Folder:
        """Of a job that workers play."""
        job = self.service.client().submit(WORKED, gpus=1)
        self.push_tasks(job)
        self.work(job)
        assert job.wait().state == "completed", job.view()
        return self.folder(job)

    def push_tasks(self, job: Job) -> None:
        with job.client() as client:
            client.push_tasks(TASKS, HELD_OUT)

    def work(self, job: Job, *options: str) -> Process:
        """Start a worker of a job that listens."""
        server, name = job.wait_for_server(), f"worker-{len(self.workers)}"
        where = self.service.state / "jobs" / job.job_id
        command = [sys.executable, HERE / "worker_process.py", server.url, where / f"{name}.jsonl", name, *options]
        self.workers.append(Process.start(command, where / f"{name}.log", key=server.api_key))
        return self.workers[-1]

    def worker_log(self, job: Job) -> list[dict[str, Any]]:
        """What its workers say that they did."""
        return self.folder(job).worker_log()

    # Machines

    def machine(self, fault: str) -> Machine:
        """One on which every model server meets the fault."""
        if fault not in self.armed:
            cpus = 10 * (len(self.nodes.nodes) + 1)
            self.armed[fault] = Machine(self.add_node(cpus, fault), cpus)
        return self.armed[fault]

    def add_node(self, cpus: int, fault: str | None = None, labels: str | None = None) -> Node:
        """Another machine, which the scheduler knows of when this returns."""
        node = self.nodes.add(cpus=cpus, settings={"PALESTRA_FAULT": fault} if fault else None, labels=labels)
        self.service.client().request("POST", "/cluster/drain", json={"on": False})  # look at the machines now
        until(lambda: self.alive(cpus), "it is seen")
        return node

    def alive(self, cpus: int) -> bool:
        """Whether Ray has a living machine of this size."""
        return any(found["alive"] and found["cpus"] == cpus for found in self.machines())

    def keep_only(self, fault: str) -> None:
        """Machines with other faults are not needed any more."""
        for other in [armed for armed in self.armed if armed != fault]:
            self.armed.pop(other).node.kill()

    def machines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.service.client().request("GET", "/cluster")["nodes"]
        return found

    # Model servers

    def held(self, job: Job) -> psutil.Process:
        """The job's server, which stands still at a fault point; wait until it does."""
        processes = partial(self.service.processes_of, job.job_id)
        return until(lambda: next(stopped(processes), None), f"the server of {job.job_id} stops at its point", 120)

    def others_continue(self, job: Job, victim: psutil.Process) -> contextlib.AbstractContextManager[None]:
        """Release the job's other servers, whenever they meet the point again, while the block is open."""
        return others_continue(partial(self.service.processes_of, job.job_id), victim, 0.5)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
