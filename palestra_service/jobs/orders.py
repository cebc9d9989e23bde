"""Orders for launchers: a job's configuration with the service's additions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.config import parse_config
from palestra_control.jobs import JobRecord, ProcessResources, Resources
from palestra_service.jobs.launcher import ENDED_FILE, RUN, BundleOrder, ServerOrder
from palestra_service.jobs.rules import Rules
from palestra_service.jobs.shared_jobs import at_base
from palestra_service.jobs.sources import recorded_job, with_own_episodes, with_own_weights
from palestra_service.placement.fitting import Node, memory_limit_gib


async def order_of(
    job: JobRecord,
    folder: Path,
    folder_of: Callable[[str], Path],
    rules: Rules,
    node_ids: Sequence[str],
    nodes: Mapping[str, Node],
    base: tuple[str, Path] | None,
) -> ServerOrder:
    """Prepare a job's folder, and return its server's order. `base`: address of its base server, and the key file."""
    config = job.config
    if job.from_job is not None:
        source = folder_of(job.from_job) / RUN
        config = await asyncio.to_thread(with_own_weights, job, folder, source)
    if job.kind == "training" and (recorded := recorded_job(config)) is not None:
        source = folder_of(recorded) / RUN
        config = await asyncio.to_thread(with_own_episodes, job, config, folder, source, rules.models)
    await asyncio.to_thread((folder / ENDED_FILE).unlink, missing_ok=True)  # left by the job's previous server
    own = job.from_job is not None
    weights = await asyncio.to_thread(lambda: rules.places(parse_config(config), started_from_job=own))
    config = await asyncio.to_thread(_with_operators_settings, config, rules)
    return ServerOrder(
        job_id=job.job_id,
        config=config if base is None else at_base(config, base[0]),
        folder=folder,
        node=node_ids[0],
        resources=job.resources,
        weights=weights,
        memory_gib=_limit(job.resources, nodes.get(node_ids[0])),
        base_key=None if base is None else base[1],
        bundles=tuple(_bundle_orders(job.resources, node_ids[1:], nodes)),
    )


def _with_operators_settings(config: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Return a configuration with settings that only the operator names: interpreters, folders, and key variables.

    They are not stored, so that tenants cannot read them, and changed rules apply to waiting jobs.
    """
    found = rules.engines.filled(config)
    for name in ("environment", "judge"):
        table = found.get(name) or {}
        if (url := table.get("url")) is not None:
            # A variable that the tenant names could be any secret of the job's process.
            found[name] = {**table, "key_variable": rules.host_variable(url, f"{name}.url")}
    return found


def _bundle_orders(resources: Resources, node_ids: Sequence[str], nodes: Mapping[str, Node]) -> Iterator[BundleOrder]:
    roles = [(bundle.role, bundle) for bundle in resources.bundles for _ in range(bundle.count)]
    for (role, needs), node_id in zip(roles, node_ids, strict=True):
        yield BundleOrder(role=role, node=node_id, resources=needs, memory_gib=_limit(needs, nodes.get(node_id)))


def _limit(needs: ProcessResources, node: Node | None) -> float | None:
    """Return the memory limit of a process on its node, in GiB; None: the node is lost, or its memory unknown."""
    return None if node is None else memory_limit_gib(needs, node)
