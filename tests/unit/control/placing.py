"""Jobs, nodes and decisions in few words, for the tests of placement."""

from __future__ import annotations

from dataclasses import dataclass

from palestra_control.jobs import SHARES, Resources
from palestra_service.placement.fitting import GpuShare, Node, RunningJob
from palestra_service.placement.placement import Placement, PlacementPolicy, place
from palestra_service.placement.queues import WaitingJob


def job(job_id, cpus=1.0, gpus=0.0, memory=0.0, tenant="t", priority="normal", at=0.0, seconds=None) -> WaitingJob:
    return WaitingJob(
        job_id=job_id,
        tenant=tenant,
        priority=priority,
        submitted_at=at,
        needs=Resources(cpus=cpus, gpus=gpus, memory_gib=memory),
        expected_seconds=seconds,
    )


def node(node_id, cpus=16.0, gpus=0, memory=64.0, **state) -> Node:
    return Node(node_id=node_id, cpus=cpus, gpus=gpus, memory_gib=memory, **state)


def runs(waiting: WaitingJob, node_id, *devices, since=0.0, ends=None, starting=False) -> RunningJob:
    """The job on this node, on all of these devices or, where it needs less than one, on a part of one."""
    share = SHARES if waiting.needs.gpus >= 1 else round(waiting.needs.gpus * SHARES)
    return RunningJob(
        job_id=waiting.job_id,
        tenant=waiting.tenant,
        submitted_at=waiting.submitted_at,
        needs=waiting.needs,
        node_id=node_id,
        devices=tuple(GpuShare(device, share) for device in devices),
        since=since,
        expected_end=ends,
        starting=starting,
    )


@dataclass(frozen=True)
class Placed:
    """A decision, and where jobs start: `a` for node a, `a:0,1` with devices."""

    decision: Placement

    @property
    def where(self) -> dict[str, str]:
        found = {}
        for start in self.decision.starts:
            devices = ",".join(str(share.device) for share in start.devices)
            found[start.job_id] = f"{start.node_id}:{devices}" if devices else start.node_id
        return found

    @property
    def order(self) -> list[str]:
        return [start.job_id for start in self.decision.starts]

    @property
    def waiting(self):
        return dict(self.decision.waiting)

    @property
    def impossible(self):
        return dict(self.decision.impossible)


def decide(queue, nodes, running=(), now=0.0, **policy) -> Placed:
    """With as many starts as fit, where the policy does not say otherwise."""
    return Placed(place(queue, running, nodes, PlacementPolicy(**({"starts_at_once": 1000} | policy)), now))
