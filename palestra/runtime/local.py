"""One job in one process: store, engine, trainer and learner (if it trains), and the data plane on a port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from palestra.algorithms.base import Algorithm
from palestra.config import JobConfig, past_name
from palestra.engine.cards import gpus_of_job
from palestra.envs.task_splits import Split
from palestra.faults import fault_point
from palestra.http.server import listen, served, url_of
from palestra.learner import Learner, Report, RunFolder, policy_spec
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.pictures.stored import StoredPictures
from palestra.proxies import spare_own_addresses
from palestra.renderers.seen_pictures import layout_fact, write_layout
from palestra.rollout import RolloutSpec
from palestra.runtime.early_checks import check_models, check_reproducible, check_trainer
from palestra.runtime.environments import environment_of
from palestra.runtime.event_loop import tune_gc
from palestra.runtime.housekeeping import looked_after
from palestra.runtime.local_job import CLOSE_SECONDS, LocalJob
from palestra.runtime.model_memory import check_memory
from palestra.runtime.numerics import note_numerics, numerics_of, threads_of
from palestra.runtime.page import create_job_app
from palestra.runtime.parts import BaseConnection, Parts, base_connector, build_parts, pooled_parts
from palestra.runtime.places import HERE, JobPlaces
from palestra.runtime.playing import algorithms_of, check_played_roles, fleet_of, runners_of
from palestra.runtime.renewal import Renewal
from palestra.runtime.run_dir import starting_in
from palestra.runtime.serving import Scoring, Serving
from palestra.runtime.tasks import load_tasks, read_files
from palestra.runtime.watchdog import Watchdog
from palestra.server import DataPlane, KeyRing
from palestra.session import PolicyRuntime, Sameness, SeatBook, SessionContext, Sessions
from palestra.store import RunStore, open_run_store
from palestra.store.casting import Casting
from palestra.store.key_files import SecretFile, publish_key
from palestra.threads import in_thread
from palestra.tracking.launch import tracking
from palestra.tracking.registry import check_trackers
from palestra.trainer.base import Trainer
from palestra.types.progress import JobProgress
from palestra.types.records import Task

log = logging.getLogger("palestra")


@asynccontextmanager
async def local_job(
    config: JobConfig,
    report: Report,
    play: RolloutSpec | None = None,
    *,
    weights: Mapping[str, str] | None = None,
    scored: Sequence[Task] | None = None,
    own_code: bool = False,
    given: Collection[Split] = (),
    places: JobPlaces = HERE,
    most_replicas: int | None = None,
) -> AsyncIterator[LocalJob]:
    """Open a job and serve its data plane while the block is open. Nothing is trained until `run` is called.

    Args:
        report: is called with every event of the job, and its data.
        play: what this process plays itself; None: the environment that `config.environment` names, or nothing.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name. None: none.
        scored: tasks to score the models on, once each, without training. None: the job does what its configuration
            says.
        own_code: whether `algorithm.name` may be a class of the user's own; never true in a server.
        given: splits whose tasks are pushed to the job, so that its environment makes none; see `load_tasks`.
        places: where its processes run beside this one.
        most_replicas: inference workers that those who have the job's key may ask for; None: any number.

    Raises:
        ConfigError: the port is in use, the folder belongs to a running job, or the configuration can't be met.
        ModelError: weights are missing.
    """
    spare_own_addresses()
    known = (config.folder / "run.db").exists()
    resumed = known and config.kind == "training"
    tasks = None if known or scored is not None else read_files(config)  # before the model, whose loading takes long
    trains = config.kind == "training" and scored is None
    algorithms = algorithms_of(config, play, own_code) if trains else {}
    if trains and play is None:
        environment_of(config)  # one that does not exist is refused before the model is loaded
    if trains and not known:
        check_played_roles(config, play)
    trackers = config.tracking if trains else []
    check_trackers(trackers)
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(starting_in(config.folder))
        folder = RunFolder(config.folder)
        by_default = "port" not in config.server.model_fields_set
        listener = stack.enter_context(listen(config.server.host, config.server.port, or_any=by_default))
        trained = (
            config if scored is None else config.model_copy(update={"kind": "inference"})
        )  # scoring needs no trainer
        parts, base = await _parts(trained, weights or {}, folder, places)
        runtimes = parts.policies.runtimes
        config = config.model_copy(update={"policies": {name: each.config for name, each in runtimes.items()}})
        if resumed:
            await parts.engine.pause()  # until the learner has published the run's weights
        store = stack.enter_context(
            open_run_store(folder.store, config.rollout, config.store, pictures=config.pictures)
        )
        try:
            computes = await in_thread(lambda: _numerics(config)) if base is None else base.numerics
            if computes:
                report("numerics", await note_numerics(store.log, computes, config.deterministic and scored is None))
            await _note_layouts(store, runtimes)
            await _create_policies(config, parts.trainer, algorithms, weights or {})
            if scored is None:
                await load_tasks(store.tasks, config, tasks, given)
            fault_point("during_start")
            context = SessionContext(
                store=store,
                policies=parts.policies,
                seed=config.seed,
                strict_history=config.rollout.strict_history,
                ignore_untrainable=config.rollout.untrainable_sampling == "ignore",
                sameness=Sameness(
                    reasoning=config.rollout.dropped_reasoning == "keep",
                    whitespace=config.rollout.stripped_whitespace == "keep",
                ),
                seats=frozenset(config.seats.roles),
            )
            stack.callback(context.pool.close)
            stack.callback(context.picture_pool.close)
            progress = JobProgress(
                job=config.name,
                steps=config.steps,
                token_budget=config.token_budget,
                run_dir=str(folder.path),
                numerics=computes,
            )
            keys = KeyRing(
                SecretFile(folder.path).recent, config.name, os.environ.get("PALESTRA_API_KEY"), config.seats.roles
            )
            publish_key(folder.path, lambda: keys.job_key)
            plane = DataPlane(
                config=config,
                store=store,
                sessions=Sessions(
                    context, config.server.max_waiting_calls, _seats(config, store) if scored is None else None
                ),
                keys=keys,
                progress=progress,
                started_at=time.time(),
                gpus=await in_thread(lambda: gpus_of_job(config)),
            )
            apart = config.environment.runners is not None and play is None and scored is None
            pool = None if apart else runners_of(config, plane.sessions, progress, play)

            async def learner(algorithms: Mapping[str, Algorithm]) -> Learner:
                assert parts.trainer is not None
                made = Learner(
                    config,
                    store,
                    parts.trainer,
                    algorithms,
                    parts.engine,
                    parts.policies,
                    folder,
                    progress,
                    report,
                    parts.pool,
                )
                await made.prepare()
                return made

            async def again() -> Learner | None:
                fresh = algorithms_of(config, play, own_code) if algorithms else {}
                await _create_policies(config, parts.trainer, fresh, weights or {})
                return await _begun_again(config, parts, store, scored is not None, lambda: learner(fresh))

            work: Learner | Serving | Scoring
            if scored is not None:
                await _first_versions(config, parts, store)
                work = Scoring(config, store, parts.engine, folder, progress, scored)
            elif parts.trainer is None:
                work = Serving(config, store.log, folder, progress, report, context.counts)
            else:
                work = await learner(algorithms)
            async with (
                served(create_job_app(plane, parts.pool, most_replicas), listener, plane.stop, plane.connections),
                looked_after(store, progress, plane.sessions.seats, config.rollout.max_episode_seconds),
                tracking(folder.path, trackers),
            ):
                start.succeeded = True
                renewable = base or parts.renewable
                renewal = None if renewable is None else Renewal(renewable, again)
                fleet = fleet_of(config, plane, url_of(listener), places.runner) if apart else None
                watchdog = _watchdog(plane, work, plays_itself=pool is not None or fleet is not None)
                async with fleet or contextlib.nullcontext():
                    yield LocalJob(
                        work,
                        plane,
                        parts.engine,
                        url_of(listener),
                        folder,
                        resumed,
                        pool,
                        renewal,
                        fleet,
                        watchdog,
                        report,
                        parts.pool,
                    )
        finally:
            await _closed("engine", parts.engine.close())
            for runtime in runtimes.values():
                runtime.grammars.close()
            if parts.trainer is not None:
                await _closed("trainer", parts.trainer.close())


def _watchdog(plane: DataPlane, work: Learner | Serving | Scoring, *, plays_itself: bool) -> Watchdog | None:
    """Return what ends a job that is stuck; None: the job trains nothing."""
    if not isinstance(work, Learner):
        return None
    return Watchdog(plane.config.watchdog, plane, plays_itself, plane.store.clock)


async def _closed(part: str, closing: Awaitable[None]) -> None:
    """Close a part of a job; one that is stuck is left to the end of the process."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await closing
    except TimeoutError:
        log.error("the %s does not end; it is left behind", part)


async def _create_policies(
    config: JobConfig, trainer: Trainer | None, algorithms: Mapping[str, Algorithm], weights: Mapping[str, str]
) -> None:
    """Give the trainer the policies that are trained."""
    if trainer is not None:
        for name, algorithm in algorithms.items():
            await trainer.create(name, policy_spec(config, algorithm, name, weights))


def _numerics(config: JobConfig) -> dict[str, str]:
    """Return what computes a job that has no base server, with its threads; {}: nothing does."""
    found = numerics_of(config)
    return found and found | threads_of(config)


async def _note_layouts(store: RunStore, runtimes: Mapping[str, PolicyRuntime]) -> None:
    """Note what the models of the policies get of pictures, so that the run's page can show it later."""
    for name, runtime in runtimes.items():
        if (layout := write_layout(runtime.renderer.picture_layout)) is not None:
            await store.log.set_fact(layout_fact(name), layout)


async def _parts(
    config: JobConfig, weights: Mapping[str, str], folder: RunFolder, places: JobPlaces
) -> tuple[Parts, BaseConnection | None]:
    """Return the parts of a job, and the connection to its base server; None: it has a model of its own."""
    if config.base is not None:
        return await base_connector()(config, weights)
    for check in (check_trainer, check_reproducible):  # before an engine takes minutes to start
        await in_thread(partial(check, config, places))
    await in_thread(lambda: check_memory(config, weights, places))
    pictures = StoredPictures(Blobs(folder.store.parent / FOLDER))  # which the run's store fills
    if config.engine.pooled or places.engine is not None:
        return await pooled_parts(config, weights, pictures, places), None
    # In a thread of its own, not of a pool.
    built = await in_thread(lambda: build_parts(config, weights, pictures, places))
    return built, None


async def _begun_again(
    config: JobConfig, parts: Parts, store: RunStore, scores: bool, learner: Callable[[], Awaitable[Learner]]
) -> Learner | None:
    """Return a learner that begins at the newest checkpoint; None: the job trains nothing, and calls may begin.

    An engine of this process waits from here on, until the learner has published the checkpoint's weights.
    """
    if parts.renewable is not None:
        await parts.engine.pause()
    if parts.trainer is not None:
        return await learner()
    if scores:
        await _first_versions(config, parts, store)
    await parts.engine.resume()
    return None


def _seats(config: JobConfig, store: RunStore) -> SeatBook | None:
    """Return the seats of a job's episodes; None: it has none."""
    if config.kind != "training" or not config.seats.roles:
        return None
    return SeatBook(config.seats, config.rollout, store.episodes, store.clock, config.server.max_waiting_calls)


async def _first_versions(config: JobConfig, parts: Parts, store: RunStore) -> None:
    """Let roles with a pool be played by the models that are scored: where nothing is trained, a pool has step 0 only.

    Args:
        config: the job.
        parts: its engine and policies.
        store: whose claims ask who plays.
    """
    roles = config.players
    for policy in sorted({roles.named[role] for role in roles.pools}):
        name = past_name(policy, 0)
        await parts.engine.add_policy(name, policy, parts.engine.version(policy), None)
        parts.policies.add_past(name, policy)
    if roles.pools:
        store.episodes.casting = Casting(roles, config.seed, config.rollout.max_staleness)


async def serve(config: JobConfig, report: Report, ready: Callable[[LocalJob], None]) -> JobProgress:
    """Run a job in the foreground until its steps are done, or until SIGINT or SIGTERM.

    Args:
        report: is called with every event of the job, and its data.
        ready: is called with the job when its data plane listens.
    """
    tune_gc()
    await in_thread(lambda: check_models(config))
    async with local_job(config, report) as job:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, job.stop)
        ready(job)
        try:
            await job.run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            await job.linger()
        return job.progress
