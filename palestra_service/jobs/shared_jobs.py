"""Jobs that ask for a shared base: its kind, and their configuration once a base server is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from palestra.config import JobConfig, parse_config
from palestra.config.checks import PLACED
from palestra.errors import ConfigError, InvalidRequest
from palestra_control.jobs import BaseKind, JobRecord
from palestra_service.placement.bases import BaseLimits, WaitingForBase, part_of_base, too_many_adapters
from palestra_service.placement.queues import WaitingJob

LIGHT_CPUS = 0.25  # of a job whose samples and gradients are computed elsewhere, unless it asks for another part


class KnownKinds:
    """The kinds of base servers that queued jobs need. Long configurations are read once, in a thread."""

    def __init__(self) -> None:
        self._known: dict[str, BaseKind | None] = {}

    async def of(self, queue: Collection[JobRecord]) -> dict[str, BaseKind]:
        """Return the kind for each job that asks for a shared base, by id; drop jobs that are no longer queued."""
        asking = [job for job in queue if job.adapters]
        new = [job for job in asking if job.job_id not in self._known]
        read = await asyncio.to_thread(lambda: {job.job_id: _readable_kind(job) for job in new}) if new else {}
        known = self._known | read
        self._known = {job.job_id: known[job.job_id] for job in asking}
        return {job_id: kind for job_id, kind in self._known.items() if kind is not None}


def by_base(
    queue: Iterable[JobRecord], kinds: Mapping[str, BaseKind], limits: BaseLimits, now: float
) -> tuple[list[WaitingJob], dict[str, WaitingForBase]]:
    """Return queued jobs for placement: those with their own model, and those on a shared base by id."""
    own, shared = list[WaitingJob](), dict[str, WaitingForBase]()
    for job in queue:
        waiting = WaitingJob(
            job_id=job.job_id,
            tenant=job.tenant,
            priority=job.priority,
            submitted_at=job.created_at,
            needs=job.resources,
            expected_seconds=job.expected_seconds(now),
            beside=part_of_base(limits, job.adapters),
        )
        if job.job_id in kinds:
            shared[job.job_id] = WaitingForBase(job=waiting, kind=kinds[job.job_id], adapters=job.adapters)
        else:
            own.append(waiting)
    return own, shared


def _readable_kind(job: JobRecord) -> BaseKind | None:
    """Return the kind of base server that a job needs; None: its configuration, from an earlier version, is invalid."""
    try:
        return base_kind(parse_config(job.config))
    except ConfigError:  # its start fails, and says why
        return None


def base_kind(config: JobConfig) -> BaseKind:
    """Return what a job needs from its base server."""
    return BaseKind(next(iter(config.policies.values())).model, config.deterministic)


def adapters_of(config: JobConfig) -> int:
    """Return a job's number of adapters on a shared base, at least 1; 0: it uses none."""
    if config.base is None:
        return 0
    return max(1, len(config.trained_policies) if config.kind == "training" else 0)


def check_shared(config: JobConfig, limits: BaseLimits) -> None:
    """Raise InvalidRequest for a job that names a base server, or an impossible shared base, naming the key."""
    for name, policy in config.policies.items():
        key = f"config.policies.{name}"
        if policy.base is None:
            continue
        if policy.base != PLACED:  # it would be called from inside of the operator's network
            raise InvalidRequest(
                f"{key}.base names a server, and this service chooses one itself; write base = {PLACED!r}",
                f"{key}.base",
            )
        model = base_kind(config).model
        if policy.model != model:
            raise InvalidRequest(
                f"{key}.model is {policy.model!r}, and another policy of the job has {model!r}; a base server has one "
                "model, which all policies of a job on it have",
                f"{key}.model",
            )
    if (adapters := adapters_of(config)) > limits.adapters:
        raise InvalidRequest(f"this job could never start: it {too_many_adapters(adapters, limits)}", "config.policies")


def at_base(config: Mapping[str, Any], address: str) -> dict[str, Any]:
    """Return a configuration whose policies name the chosen base server's address."""
    policies = {name: {**policy, "base": address} for name, policy in config["policies"].items()}
    return {**config, "policies": policies}
