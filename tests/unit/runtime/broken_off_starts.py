"""Joins a local Ray cluster, breaks off starts of a model server at several moments, and says what each has left.

A process of its own: Ray reads the variables of its authentication when it is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palestra_control.jobs import Resources
from palestra_service.jobs.launcher import ServerOrder
from palestra_service.ray.cluster import LocalRay, connect, disconnect, stop_local

SECONDS = 60.0


class Gate:
    """Holds up what Ray is asked to make, in the thread that asks for it."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def before(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def later(*arguments: Any, **more: Any) -> Any:
            self.begun.set()
            assert self.go.wait(SECONDS)
            return make(*arguments, **more)

        return later


async def left_by(folder: Path, moment: str) -> dict[str, Any]:
    """Break off a start at a moment, and return what is left of it when it says that it is over."""
    import ray

    from palestra_service.ray import servers

    launcher, gate = servers.RayServers(), Gate()
    (node,) = await launcher.nodes()
    order = ServerOrder(
        job_id="job", config={}, folder=folder / "job", node=node.node_id, resources=Resources(cpus=1.0)
    )
    make_group, make_actor = servers.placement_group, ray.actor.ActorClass._remote
    if moment == "group":
        servers.placement_group = gate.before(make_group)
    elif moment == "actor":
        ray.actor.ActorClass._remote = gate.before(make_actor)
    try:
        starting = asyncio.ensure_future(launcher.start(order))
        if moment == "server":
            while await launcher.known() != ["job"] or "palestra-job" not in ray.util.list_named_actors():
                await asyncio.sleep(0.01)
        else:
            assert await asyncio.to_thread(gate.begun.wait, SECONDS)
        starting.cancel()
        gate.go.set()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
    finally:
        servers.placement_group, ray.actor.ActorClass._remote = make_group, make_actor
    while ray.available_resources().get("CPU") != 1.0:  # Ray says a while later what is free
        await asyncio.sleep(0.1)
    return {"cancelled": starting.cancelled(), "known": await launcher.known()}


async def all_moments(folder: Path, moments: list[str]) -> None:
    for moment in moments:
        async with asyncio.timeout(SECONDS):
            print(json.dumps({moment: await left_by(folder, moment)}), flush=True)


if __name__ == "__main__":
    state = Path(sys.argv[1])
    connect(None, state, LocalRay(cpus=1.0))
    try:
        asyncio.run(all_moments(state, sys.argv[2:]))
    finally:
        disconnect()
        stop_local(state)
