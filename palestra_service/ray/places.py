"""Where the processes of a job run that has bundles for them."""

from __future__ import annotations

import shutil
from collections.abc import Collection

from ray.util.placement_group import get_current_placement_group

from palestra.process.child import ProcessStarter
from palestra.runtime.terms import JobPlaces
from palestra_control.jobs import Role
from palestra_service.jobs.launcher import ServerOrder
from palestra_service.ray.process_host import Bundles

FOLDER = "exchange"  # in a job's folder: weights on their way between machines


def places_of(order: ServerOrder, pass_env: Collection[str], here: str) -> JobPlaces:
    """Return where the processes of the calling actor's job run. `order`: its folder is shared by all machines. `here`:
    address of this machine in the cluster.
    """
    group = get_current_placement_group()
    assert group is not None

    def of(role: Role) -> ProcessStarter | None:
        # The job's own process has the first bundle of the group.
        own = {index: one for index, one in enumerate(order.bundles, start=1) if one.role == role}
        return Bundles(group, own, pass_env, order.folder, here).start if own else None

    engine, trainer, folder = of("engine"), of("trainer"), None
    if engine is not None or trainer is not None:
        folder = order.folder / FOLDER
        shutil.rmtree(folder, ignore_errors=True)  # what a process that was killed has left there
        folder.mkdir(mode=0o700, parents=True)
    limits = [one.memory_gib for one in order.bundles if one.role == "trainer" and one.memory_gib is not None]
    return JobPlaces(
        runner=of("runner"),
        engine=engine,
        trainer=trainer,
        rank_memory_gib=min(limits, default=None),
        folder=folder,
    )
