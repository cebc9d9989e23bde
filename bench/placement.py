"""The scheduler's decision alone: 10^4 waiting jobs, 125 nodes of 8 GPUs, in one call of `place`.

python bench/placement.py [--jobs N] [--nodes N] [--repeats N]       prints seconds by case

The floor is what plain Python takes to look at every job once: sort them, and give each a reason in a dictionary.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from figures import Part

from palestra_control.jobs import PRIORITIES, SHARES, Resources
from palestra_service.placement.fitting import GpuShare, Node, RunningJob
from palestra_service.placement.placement import PlacementPolicy, place
from palestra_service.placement.queues import WaitingJob

TABLE = "One decision: which of the waiting jobs start where"
DEVICES, TENANTS, NOW = 8, 50, 100_000.0
EVERYTHING = PlacementPolicy(starts_at_once=1_000_000, aging_seconds=1800.0)
Case = tuple[list[WaitingJob], list[RunningJob], list[Node], PlacementPolicy]


def needs_of(draw: random.Random, distinct: bool) -> Resources:
    """What one job asks for; with `distinct` hardly two ask for the same."""
    gpus = draw.choice((0.0, 0.1, 0.25, 0.5, 1.0, 1.0, 2.0, 4.0, 8.0))
    cpus, memory = draw.choice((1.0, 2.0, 4.0, 8.0)), draw.choice((4.0, 16.0, 32.0))
    if distinct:
        cpus, memory = draw.randrange(1, 80_000) / SHARES, draw.uniform(1.0, 64.0)
    return Resources(cpus=cpus, gpus=gpus, memory_gib=memory)


def waiting(count: int, distinct: bool = False, estimates: bool = False) -> list[WaitingJob]:
    """Jobs of 50 tenants, submitted within the last two hours."""
    draw = random.Random(0)
    return [
        WaitingJob(
            job_id=f"job-{i}",
            tenant=f"tenant-{draw.randrange(TENANTS)}",
            priority=draw.choice(PRIORITIES),
            submitted_at=NOW - draw.uniform(0.0, 7200.0),
            needs=needs_of(draw, distinct),
            expected_seconds=draw.uniform(60.0, 7200.0) if estimates else None,
        )
        for i in range(count)
    ]


def machines(count: int) -> list[Node]:
    """Equal nodes."""
    return [Node(node_id=f"node-{i}", cpus=96.0, gpus=DEVICES, memory_gib=1024.0) for i in range(count)]


def running(nodes: list[Node], share: float) -> list[RunningJob]:
    """Every device has a job, or half of one where `share` is 0.5."""
    draw = random.Random(1)
    return [
        RunningJob(
            job_id=f"running-{node.node_id}-{device}",
            tenant=f"tenant-{draw.randrange(TENANTS)}",
            submitted_at=0.0,
            needs=Resources(cpus=4.0, gpus=share, memory_gib=16.0),
            node_id=node.node_id,
            devices=(GpuShare(device, int(share * SHARES)),),
            since=NOW - draw.uniform(0.0, 7200.0),
            expected_end=NOW + draw.uniform(1.0, 7200.0),
        )
        for node in nodes
        for device in range(DEVICES)
    ]


def cases(jobs: int, count: int) -> dict[str, Case]:
    """What is measured, by name."""
    nodes = machines(count)
    full, freed = running(nodes, 1.0), running(nodes, 1.0)[1:]
    two = replace(EVERYTHING, starts_at_once=2)
    return {
        "empty cluster, as many starts as fit": (waiting(jobs), [], nodes, EVERYTHING),
        "empty cluster, two starts": (waiting(jobs), [], nodes, two),
        "half of every device taken": (waiting(jobs), running(nodes, 0.5), nodes, EVERYTHING),
        "every device taken": (waiting(jobs), full, nodes, EVERYTHING),
        "one device freed, two starts": (waiting(jobs), freed, nodes, two),
        "with estimates, as many starts as fit": (waiting(jobs, estimates=True), freed[40:], nodes, EVERYTHING),
        "no two jobs alike": (waiting(jobs, distinct=True), [], nodes, EVERYTHING),
    }


def seconds_of(call: Callable[[], object], repeats: int) -> list[float]:
    """CPU seconds of each repetition, the collector of garbage switched off; one thread, and nothing waits."""
    found = []
    for _ in range(repeats):
        gc.collect()
        gc.disable()
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
        gc.enable()
    return found


def floor(queue: list[WaitingJob]) -> dict[str, str]:
    """Look at each job once, in order."""
    ordered = sorted(queue, key=lambda job: (job.priority, job.submitted_at, job.job_id))
    return {job.job_id: f"waits for {job.needs.gpus} GPUs" for job in ordered}


def measured(jobs: int, count: int, repeats: int) -> Iterator[tuple[str, int, list[float]]]:
    """Each case with the number of jobs that start, and its seconds; the floor first."""
    queue = waiting(jobs)
    yield "floor: sort, and a reason for each", 0, seconds_of(lambda: floor(queue), repeats)
    for name, case in cases(jobs, count).items():
        starts = len(place(*case, NOW).starts)
        yield name, starts, seconds_of(lambda case=case: place(*case, NOW), repeats)


def run(part: Part, quick: bool) -> None:
    """A row for each case."""
    repeats = 3 if quick else 15
    command = f".venv/bin/python bench/placement.py --repeats {repeats}"
    for name, starts, seconds in measured(10_000, 125, repeats):
        part.add(TABLE, name, command, CPU__ms=[1e3 * value for value in seconds], jobs__started=[starts])


def main() -> None:
    """Print one JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for name, starts, seconds in measured(arguments.jobs, arguments.nodes, arguments.repeats):
        print(json.dumps({"case": name, "starts": starts, "seconds": [round(value, 4) for value in seconds]}))


if __name__ == "__main__":
    main()
