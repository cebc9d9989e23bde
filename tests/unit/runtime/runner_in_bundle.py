"""Joins a local Ray cluster, starts a runner in a bundle with hardly any memory, and prints how it died.

A process of its own: Ray reads the variables of its authentication when it is imported.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from palestra.runtime.runner_fleet import RunnerDied, RunnerOrder, run_runner
from palestra_control.jobs import ProcessResources
from palestra_service.jobs.launcher import BundleOrder
from palestra_service.ray.cluster import LocalRay, connect, disconnect, stop_local

SECONDS = 60.0


async def how_it_died(folder: Path) -> str:
    from ray.util.placement_group import placement_group

    from palestra_service.ray.process_host import Bundles

    group = placement_group([{"CPU": 1.0}])
    order = BundleOrder(role="runner", node="here", resources=ProcessResources(cpus=1.0), memory_gib=0.001)
    bundles = Bundles(group, {0: order}, (), folder, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as job:  # which never answers
        asked = RunnerOrder(url=f"http://127.0.0.1:{job.getsockname()[1]}", key=lambda: "key", concurrency=1)
        try:
            async with asyncio.timeout(SECONDS):
                await run_runner(bundles.start, asked, "worker")
        except RunnerDied as error:
            return str(error)
    return "it did not die"


if __name__ == "__main__":
    state = Path(sys.argv[1])
    connect(None, state, LocalRay(cpus=1.0))
    try:
        print(asyncio.run(how_it_died(state)))
    finally:
        disconnect()
        stop_local(state)
