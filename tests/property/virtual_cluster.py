"""A cluster in virtual time, driven by `place` alone. It looks at every decision, and at all that runs after each."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import replace

from palestra_control.jobs import SHARES
from palestra_service.placement.fitting import RunningJob, counted
from palestra_service.placement.placement import Placement, place
from palestra_service.placement.queues import WaitingJob

AGING, LONGEST, STARTING = 50.0, 40.0, 1.0  # seconds


class Cluster:
    """Jobs, nodes and a virtual clock. Every change is followed by decisions until nothing starts."""

    def __init__(self, nodes, policy, seconds) -> None:
        """`seconds` is how long each job really runs."""
        self.nodes = {node.node_id: node for node in nodes}
        self.policy, self.seconds = policy, dict(seconds)
        self.now = 0.0
        self.waiting: dict[str, WaitingJob] = {}
        self.running: dict[str, tuple[WaitingJob, RunningJob]] = {}
        self.impossible: dict[str, str] = {}
        self.started: dict[str, list[float]] = {}  # times of the starts of each job
        self.ended: dict[str, float] = {}
        self._events, self._numbers, self._asked = [], itertools.count(), None

    def at(self, when, what, *arguments) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what, arguments))

    def run(self, until=float("inf"), stop=lambda: False) -> None:
        while self._events and self._events[0][0] <= until and not stop():
            when, _, what, arguments = heapq.heappop(self._events)
            assert when >= self.now
            self.now = when
            if what(*arguments) is not False:
                self._settle()

    # What happens

    def submit(self, job) -> None:
        self.waiting[job.job_id] = job

    def set_node(self, node) -> None:
        """It dies, comes back, or begins to drain; jobs of a node that dies wait again."""
        self.nodes[node.node_id] = node
        for job, held in list(self.running.values()):
            if held.node_id == node.node_id and not node.alive:
                del self.running[job.job_id]
                self.waiting[job.job_id] = job

    def set_policy(self, policy) -> None:
        self.policy = policy

    def _is_up(self, job_id, since) -> bool | None:
        if self._runs(job_id, since):
            job, held = self.running[job_id]
            self.running[job_id] = job, replace(held, starting=False)
            return None
        return False

    def _end(self, job_id, since) -> bool | None:
        if self._runs(job_id, since):
            del self.running[job_id]
            self.ended[job_id] = self.now
            return None
        return False

    def _ask(self, number) -> bool:
        return number == self._asked

    def _runs(self, job_id, since) -> bool:
        return job_id in self.running and self.running[job_id][1].since == since

    # What is decided

    def decide(self, at=None) -> Placement:
        held = [held for _, held in self.running.values()]
        now = self.now if at is None else at
        decision = place(self.waiting.values(), held, self.nodes.values(), self.policy, now)
        named = [[start.job_id for start in decision.starts], decision.waiting, decision.impossible]
        assert sorted(itertools.chain(*named)) == sorted(self.waiting), "every job is in one of the three"
        assert all(decision.waiting.values()), "every job that waits has a reason"
        return decision

    def _settle(self) -> None:
        while True:
            decision = self.decide()
            self._check_order(decision)
            for start in decision.starts:
                self._start(start)
            for job_id, reason in decision.impossible.items():
                self.impossible[job_id] = reason
                del self.waiting[job_id]
            self.check()
            if not decision.starts:
                break
        self._asked = next(self._numbers)
        if decision.again_at is not None:
            assert decision.again_at > self.now
            self.at(decision.again_at, self._ask, self._asked)
        until = self.now + 4 * AGING if decision.again_at is None else decision.again_at
        for at in ((self.now + until) / 2, until - 0.001):
            assert not self.decide(at=at).starts, "nothing would have started before again_at"

    def _start(self, start) -> None:
        job = self.waiting.pop(start.job_id)
        node = self.nodes[start.node_id]
        assert node.alive
        assert not node.draining
        assert not self.policy.draining
        ends = None if job.expected_seconds is None else self.now + job.expected_seconds
        held = RunningJob(
            job_id=job.job_id,
            tenant=job.tenant,
            submitted_at=job.submitted_at,
            needs=job.needs,
            node_id=start.node_id,
            devices=start.devices,
            since=self.now,
            expected_end=ends,
            starting=True,
        )
        self.running[job.job_id] = job, held
        self.started.setdefault(job.job_id, []).append(self.now)
        self.at(self.now + STARTING, self._is_up, job.job_id, self.now)
        self.at(self.now + STARTING + self.seconds[job.job_id], self._end, job.job_id, self.now)

    # What has to hold

    def check(self) -> None:
        self._check_rooms()
        assert sum(held.starting for _, held in self.running.values()) <= self.policy.starts_at_once

    def _check_rooms(self) -> None:
        devices, cpus, memory = Counter(), Counter(), Counter()
        for _, held in self.running.values():
            needs = counted(held.needs)
            assert sum(share for _, share in held.devices) == needs.gpus
            assert needs.gpus >= SHARES or len(held.devices) <= 1, "a part of a GPU is on one device"
            assert needs.gpus < SHARES or all(share == SHARES for _, share in held.devices), "whole ones are whole"
            assert len({device for device, _ in held.devices}) == len(held.devices)
            cpus[held.node_id] += needs.cpus
            memory[held.node_id] += needs.memory
            for device, share in held.devices:
                assert 0 <= device < self.nodes[held.node_id].gpus
                devices[held.node_id, device] += share
        assert all(share <= SHARES for share in devices.values()), "no device is given twice"
        for node_id, node in self.nodes.items():
            assert cpus[node_id] <= node.capacity.cpus
            assert memory[node_id] <= node.capacity.memory

    def check_quotas(self, tenant, quota) -> None:
        held = [held for _, held in self.running.values() if held.tenant == tenant]
        needs = [counted(one.needs) for one in held]
        used = [*(sum(column) for column in zip((0, 0, 0), *needs, strict=True)), len(held)]
        assert all(limit is None or have <= limit for have, limit in zip(used, quota.limits, strict=True))

    def _check_order(self, decision) -> None:
        """Of equal jobs of one tenant and priority, none that starts was submitted after one that waits."""
        started = {start.job_id for start in decision.starts}
        alike: dict[tuple[object, ...], list[WaitingJob]] = {}
        for job in self.waiting.values():
            alike.setdefault((job.tenant, job.priority, counted(job.needs)), []).append(job)
        for jobs in alike.values():
            jobs.sort(key=lambda job: (job.submitted_at, job.job_id))
            starts = [job.job_id in started for job in jobs]
            assert starts == sorted(starts, reverse=True)
