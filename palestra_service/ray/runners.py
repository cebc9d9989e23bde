"""Runners as Ray actors in the placement group of their job, so that they end with it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from palestra.runtime.runner_fleet import RunnerDied, RunnerOrder, RunnerStarter, play_episodes
from palestra.runtime.terms import JobPlaces
from palestra_control.jobs import Role
from palestra_service.jobs.launcher import ServerOrder
from palestra_service.ray.job_environment import limit_environment
from palestra_service.ray.memory_watch import join
from palestra_service.ray.process_host import Bundles, MemoryLimit


class _Runner:
    """A process that plays the environment of a job, with the variables that the job has."""

    def __init__(self, pass_env: Collection[str], memory: MemoryLimit | Path | None) -> None:
        limit_environment(os.environ, pass_env)
        if isinstance(memory, Path):
            join(memory)
        elif memory is not None:
            memory.watch(os.getpid())

    async def play(self, url: str, key: str, worker_id: str, concurrency: int) -> None:
        await play_episodes(url, key, worker_id, concurrency)


def runner_actors(pass_env: Collection[str], bundles: Bundles | None, beside: Path) -> RunnerStarter:
    """Return what starts the runners of this actor's job.

    Args:
        bundles: of runners; None: the job's own bundle has a core and the memory for each runner.
        beside: folder by which runners in the job's own bundle register for its memory limit.
    """
    if bundles is None:
        return partial(_play_beside, get_current_placement_group(), tuple(pass_env), beside)
    return partial(_play_in, bundles, tuple(pass_env))


async def _play_beside(group: Any, pass_env: tuple[str, ...], beside: Path, order: RunnerOrder, worker_id: str) -> None:
    """Run a runner in the job's own bundle. See `RunnerStarter`."""
    make: Any = ray.remote(_Runner)
    place = PlacementGroupSchedulingStrategy(group, 0)
    actor = make.options(num_cpus=1, max_restarts=0, scheduling_strategy=place).remote(pass_env, beside)
    await _play(actor, order, worker_id)


async def _play_in(bundles: Bundles, pass_env: tuple[str, ...], order: RunnerOrder, worker_id: str) -> None:
    """Run a runner in a bundle of its own. See `RunnerStarter`."""
    async with bundles.taken() as index:
        limit = await asyncio.to_thread(bundles.memory_limit, index)
        try:
            await _play(bundles.actor(index, ray.remote(_Runner), pass_env, limit), order, worker_id)
        except RunnerDied as error:
            said = None if limit is None else await asyncio.to_thread(limit.said)
            raise error if said is None else RunnerDied(f"died: {said}") from None


async def _play(actor: Any, order: RunnerOrder, worker_id: str) -> None:
    """Have an actor play until the job is over, and end it."""
    try:
        await actor.play.remote(order.url, order.key(), worker_id, order.concurrency)
    except ray.exceptions.RayTaskError as error:  # it has said why it can't play
        raise RunnerDied(f"ended: {error.cause or error}") from None
    except ray.exceptions.RayError as error:
        raise RunnerDied(f"died: {(str(error).strip().splitlines() or [''])[0]}") from None
    finally:
        ray.kill(actor)


FOLDER = "exchange"  # in a job's folder: weights on their way between machines
_BESIDE = "beside"  # numbers of the processes in a job's own bundle whose memory counts with its own


def beside_job(folder: Path) -> Path:
    """Return where processes in the job's own bundle register; see `memory_watch.join`."""
    return folder / _BESIDE


def places_of(order: ServerOrder, pass_env: Collection[str], here: str) -> JobPlaces:
    """Return where the processes of the calling actor's job run. `order`: its folder is shared by all machines. `here`:
    address of this machine in the cluster.
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
