"""Runners as Ray actors: one core each, in the placement group of their job, so that they end with it."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from palestra.runtime.ray.job_environment import limit_environment
from palestra.runtime.runner import play_environment
from palestra.runtime.runner_fleet import RunnerDied, RunnerOrder, RunnerStarter


class _Runner:
    """A process that plays the environment of a job, with the variables that the job has."""

    def __init__(self, pass_env: Collection[str]) -> None:
        limit_environment(os.environ, pass_env)

    async def play(self, url: str, key: str, worker_id: str, concurrency: int) -> None:
        await play_environment(url, key, worker_id, concurrency)


def runner_actors(pass_env: Collection[str]) -> RunnerStarter:
    """Return what starts the runners of the job that runs in this actor.

    Args:
        pass_env: variables of the operator that they get, as the job does.
    """
    return partial(_play, get_current_placement_group(), tuple(pass_env))


async def _play(group: Any, pass_env: tuple[str, ...], order: RunnerOrder, worker_id: str) -> None:
    """Run a runner as an actor, until the job is over. See `RunnerStarter`.

    Args:
        group: the placement group of the job, which has a core for each runner.
        pass_env: see `runner_actors`.
        order: what the runner has to know.
        worker_id: the name under which it claims episodes.

    Raises:
        RunnerDied: the actor has ended otherwise.
    """
    make: Any = ray.remote(_Runner)
    actor = make.options(
        num_cpus=1, max_restarts=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)
    ).remote(pass_env)
    try:
        await actor.play.remote(order.url, order.key(), worker_id, order.concurrency)
    except ray.exceptions.RayTaskError as error:  # it has said why it can't play
        raise RunnerDied(f"ended: {error.cause or error}") from None
    except ray.exceptions.RayError as error:
        raise RunnerDied(f"died: {(str(error).strip().splitlines() or [''])[0]}") from None
    finally:
        ray.kill(actor)
