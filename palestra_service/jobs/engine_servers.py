"""Servers of vLLM and SGLang that jobs name: each has the weights of one job, so that one job at a time may use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from palestra.types.jobs import JobRecord


class ServersInUse:
    """Which live job uses which servers."""

    def __init__(self) -> None:
        """Begin without live jobs."""
        self._held: dict[str, frozenset[str]] = {}

    def hold(self, job: JobRecord) -> None:
        """Assign the servers that a starting or running job names."""
        if named := _named(job.config):
            self._held[job.job_id] = named

    def release(self, job_id: str) -> None:
        """Release the servers of an ended job, if it had any."""
        self._held.pop(job_id, None)

    def waiting(self, jobs: Iterable[JobRecord]) -> dict[str, str]:
        """Return why jobs can't start now, by the id of each that names a server in use."""
        held = frozenset[str]().union(*self._held.values())
        taken = {job.job_id: min(found) for job in jobs if (found := _named(job.config) & held)}
        return {job_id: f"waits for the engine's server {url}, which another job uses" for job_id, url in taken.items()}


def _named(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the addresses of servers that a job names."""
    engine = config.get("engine") or {}
    urls = [table.get("url") for table in engine.get("workers", [engine])]
    return frozenset(url for one in urls if one is not None for url in ([one] if isinstance(one, str) else one))
