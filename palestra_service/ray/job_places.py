"""Where the processes of a job run on a cluster: in placed bundles, or in the job's own."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ray.util.placement_group import get_current_placement_group

from palestra.runtime.places import JobPlaces
from palestra.types.jobs import Role
from palestra_service.jobs.launcher import ServerOrder
from palestra_service.ray.process_host import Bundles
from palestra_service.ray.runners import runner_actors

FOLDER = "exchange"  # in a job's folder: weights on their way between machines
_BESIDE = "beside"  # numbers of the processes in a job's own bundle whose memory counts with its own


def beside_job(folder: Path) -> Path:
    """Return where processes in the job's own bundle register; see `memory_watch.join`."""
    return folder / _BESIDE


def places_of(order: ServerOrder, pass_env: Collection[str], here: str) -> JobPlaces:
    """Return where the processes of the calling actor's job run.

    Args:
        order: its folder is shared by all machines.
        pass_env: the operator's variables for processes.
        here: address of this machine in the cluster.
    """
    group = get_current_placement_group()
    assert group is not None

    def of(role: Role) -> Bundles | None:
        # The job's own process has the first bundle of the group.
        own = {index: one for index, one in enumerate(order.bundles, start=1) if one.role == role}
        return Bundles(group, own, pass_env, order.folder, here) if own else None

    near = beside_job(order.folder)
    shutil.rmtree(near, ignore_errors=True)  # those of a process that was killed
    engine, trainer = of("engine"), of("trainer")
    folder = None
    if engine is not None or trainer is not None:
        folder = order.folder / FOLDER
        shutil.rmtree(folder, ignore_errors=True)  # what a process that was killed has left there
        folder.mkdir(mode=0o700, parents=True)
    limits = [one.memory_gib for one in order.bundles if one.role == "trainer" and one.memory_gib is not None]
    return JobPlaces(
        runner=runner_actors(pass_env, of("runner"), near),
        engine=None if engine is None else engine.start,
        trainer=None if trainer is None else trainer.start,
        rank_memory_gib=min(limits, default=None),
        folder=folder,
    )
