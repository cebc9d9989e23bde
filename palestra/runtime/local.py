"""One job in one process: store, engine, trainer and learner (if it trains), and the data plane on a port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp

from palestra.algorithms.base import Algorithm
from palestra.client.harness import check_harness_config
from palestra.client.task_files import read_task_files
from palestra.config import JobConfig, JudgeAccess, past_name
from palestra.config.budget import AUDIT, JUDGE
from palestra.engine.cards import gpus_of_job
from palestra.faults import fault_point
from palestra.http.server import listen, served, tune_gc, url_of
from palestra.learner import Audit, Learner, OpenRun, Report, RunFolder, policy_spec
from palestra.pictures.blobs import FOLDER, Blobs, StoredPictures
from palestra.proxies import spare_own_addresses
from palestra.renderers.picture_layout import layout_fact, write_layout
from palestra.rollout import RolloutSpec
from palestra.runtime.early_checks import (
    check_models,
    check_reproducible,
    check_trainer,
    note_numerics,
    numerics_of,
    threads_of,
)
from palestra.runtime.judging import Judging
from palestra.runtime.local_job import CLOSE_SECONDS, LocalJob, looked_after
from palestra.runtime.model_memory import check_memory
from palestra.runtime.page import create_job_app
from palestra.runtime.parts import BaseConnection, Parts, base_connector, build_parts, pooled_parts
from palestra.runtime.playing import algorithms_of, check_played_roles, fleet_of, plays_apart, plays_of, runners_of
from palestra.runtime.renewal import Renewal
from palestra.runtime.run_dir import starting_in
from palestra.runtime.serving import Scoring, Serving
from palestra.runtime.spending import open_metering, recorded_loading
from palestra.runtime.tasks import load_tasks
from palestra.runtime.terms import USUAL, JobTerms
from palestra.server import DataPlane, KeyRing
from palestra.session import Sameness, SeatBook, SessionContext, Sessions
from palestra.store import RunStore, open_run_store
from palestra.store.casting import Casting
from palestra.store.key_files import SecretFile, publish_key
from palestra.threads import in_thread
from palestra.tracking.process import tracking
from palestra.tracking.registry import check_trackers
from palestra.types.progress import JobProgress

log = logging.getLogger("palestra")


@asynccontextmanager
async def local_job(
    config: JobConfig, report: Report, play: RolloutSpec | None = None, terms: JobTerms = USUAL
) -> AsyncIterator[LocalJob]:
    """Open a job and serve its data plane while the block is open. Training begins with `run`. `play`: played by this
    process; None: the environment that `config.environment` names, if any.
    """
    began = time.monotonic()
    spare_own_addresses()
    known, scores = (config.folder / "run.db").exists(), terms.scored is not None
    trains = config.kind == "training" and not scores
    tasks = terms.tasks
    if not (tasks or known or scores):
        tasks = read_task_files(config)  # before the model, whose loading takes long
    algorithms = _algorithms(config, play, terms, known) if trains else {}
    trackers = config.tracking if trains else []
    check_trackers(trackers)
    async with contextlib.AsyncExitStack() as stack:
        start = stack.enter_context(starting_in(config.folder))
        folder = RunFolder(config.folder)
        server = config.server
        listener = stack.enter_context(listen(server.host, server.port, or_any=not server.port_is_given))
        counted = not scores and (terms.allowed or config.prices or config.budget) is not None
        async with recorded_loading(config.folder, began) if counted else contextlib.nullcontext(began) as began:
            parts, base = await _parts(config, terms, folder)
        try:
            run = await _open_run(config, report, parts, folder, stack, None if scores else (began, terms))
        except BaseException:
            await _close(parts)
            raise
        context = _context(run)
        stack.callback(context.pool.close)
        stack.callback(context.picture_pool.close)
        stack.push_async_callback(_close, parts)
        await _note_models(run, base, scores)
        await _create_policies(run, algorithms, terms.weights)
        if not scores:
            await load_tasks(run.store.tasks, run.config, tasks)
        fault_point("during_start")
        plane = await _data_plane(run, context, scores)
        apart = terms.plays and play is None and not scores and plays_apart(run.config)
        pool = None if apart else runners_of(run.config, plane.sessions, run.progress, play)
        judging = _judging(run, plane, url_of(listener), play) if trains or scores else None
        audit = _audit(run, plane, url_of(listener)) if trains else None
        app: ASGIApp = (own := create_job_app(plane, run.workers, terms.most_replicas))
        if terms.extension is not None:
            extension = await stack.enter_async_context(terms.extension(run, plane, own))
            app, terms = extension.app, replace(terms, source=extension)
        work = await _work(run, algorithms, terms, context.counts, audit)
        async with (
            served(app, listener, plane.stop, plane.connections),
            looked_after(run.store, run.progress, plane.sessions.seats, run.config.rollout.timeout_seconds),
            tracking(folder.path, trackers),
        ):
            start.succeeded = True
            url, renewable = url_of(listener), base or parts.renewable
            again = partial(_begin_again, run, parts, play, terms, audit)
            renewal = None if renewable is None else Renewal(renewable, again)
            fleet = fleet_of(run.config, plane, url, terms.places.runner) if apart else None
            async with fleet or contextlib.nullcontext():
                yield LocalJob(run, work, plane, url, pool or fleet, renewal, judging)


def _judging(run: OpenRun, plane: DataPlane, url: str, play: RolloutSpec | None) -> Judging | None:
    """Return what judges the episodes of a job; None: it has no judge."""
    if run.config.judge is None:
        return None
    return Judging(run, run.config.judge, _access(run, plane, url, JUDGE), alone=play is not None and play.only_judged)


def _audit(run: OpenRun, plane: DataPlane, url: str) -> Audit | None:
    """Return what looks whether the reward of a job is gamed; None: nothing does."""
    return None if run.config.audit is None else Audit(run, run.config.audit, _access(run, plane, url, AUDIT))


def _access(run: OpenRun, plane: DataPlane, url: str, payee: str) -> JudgeAccess:
    meter = None if run.metering is None else run.metering.server("audit" if payee == AUDIT else "judge", payee)
    return JudgeAccess(
        url=url,
        key=lambda: plane.keys.playground_key,
        frozen=run.config.frozen_policies,
        meter=meter,
        pictures=run.store.pictures.get,
    )


def _algorithms(config: JobConfig, play: RolloutSpec | None, terms: JobTerms, known: bool) -> dict[str, Algorithm]:
    """Return the algorithms of a training job; errors are raised before its model is loaded."""
    found = algorithms_of(config, play, terms.own_code)
    if play is None:
        plays_of(config, None)
        if config.harness is not None and terms.plays:
            check_harness_config(config.harness)
    if not known:
        check_played_roles(config, play)
    return found


async def _open_run(
    config: JobConfig,
    report: Report,
    parts: Parts,
    folder: RunFolder,
    stack: contextlib.AsyncExitStack,
    counts: tuple[float, JobTerms] | None,
) -> OpenRun:
    """Open the store of a job's run; until the learner has published the weights of a resumed one, the engine waits.

    `counts`: when the job's devices were taken (monotonic seconds), and its terms; None: it counts nothing.
    """
    policies = {name: each.config for name, each in parts.policies.runtimes.items()}
    config = config.model_copy(update={"policies": policies})
    resumed = folder.store.exists() and config.kind == "training"
    if resumed:
        await parts.engine.pause()
    progress = JobProgress(
        job=config.name, steps=config.steps, token_budget=config.token_budget, run_dir=str(folder.path)
    )
    store = stack.enter_context(open_run_store(folder.store, config.rollout, pictures=config.pictures))
    return OpenRun(
        config=config,
        store=store,
        engine=parts.engine,
        policies=parts.policies,
        folder=folder,
        progress=progress,
        report=report,
        workers=parts.pool,
        resumed=resumed,
        trainer=parts.trainer,
        metering=None if counts is None else await open_metering(config, store, counts[0], counts[1].allowed),
    )


def _context(run: OpenRun) -> SessionContext:
    """Return the shared context of a run's sessions."""
    rollout = run.config.rollout
    keeps = rollout.changed_history == "keep"
    return SessionContext(
        store=run.store,
        policies=run.policies,
        seed=run.config.seed,
        strict_history=rollout.changed_history == "refuse",
        ignore_untrainable=run.config.server.unknown_fields == "ignore",
        sameness=Sameness(reasoning=keeps, whitespace=keeps),
        seats=frozenset(run.config.seats.roles),
        metering=run.metering,
    )


async def _note_models(run: OpenRun, base: BaseConnection | None, scores: bool) -> None:
    """Record the job's numerics and image settings, so that the run's page can show them later."""
    run.progress.numerics = await in_thread(lambda: _numerics(run.config)) if base is None else base.numerics
    if computes := run.progress.numerics:
        data = await note_numerics(run.store.log, computes, run.config.deterministic and not scores)
        run.report("numerics", data)
    for name, runtime in run.policies.runtimes.items():
        if (layout := write_layout(runtime.renderer.picture_layout)) is not None:
            await run.store.log.set_fact(layout_fact(name), layout)


async def _data_plane(run: OpenRun, context: SessionContext, scores: bool) -> DataPlane:
    """Return the data plane of a run, and publish its key in the run's folder."""
    config, path = run.config, run.folder.path
    keys = KeyRing(SecretFile(path).recent, config.name, os.environ.get("PALESTRA_API_KEY"), config.seats.roles)
    publish_key(path, lambda: keys.job_key)
    seats = None if scores else _seats(config, run.store)
    return DataPlane(
        config=config,
        store=run.store,
        sessions=Sessions(context, config.server.max_waiting_calls, seats),
        keys=keys,
        progress=run.progress,
        started_at=time.time(),
        gpus=await in_thread(lambda: gpus_of_job(config)),
    )


async def _work(
    run: OpenRun, algorithms: Mapping[str, Algorithm], terms: JobTerms, counts: Mapping[str, int], audit: Audit | None
) -> Learner | Serving | Scoring:
    """Return the work of a job: scoring tasks, training, or serving."""
    if terms.scored is not None:
        await _first_versions(run)
        return Scoring(run, terms.scored)
    return Serving(run, counts) if run.trainer is None else await _learner(run, algorithms, terms, audit)


async def _learner(run: OpenRun, algorithms: Mapping[str, Algorithm], terms: JobTerms, audit: Audit | None) -> Learner:
    assert run.trainer is not None
    made = Learner(run, run.trainer, algorithms, terms.sampler, audit, terms.source)
    await made.prepare()
    return made


async def _begin_again(
    run: OpenRun, parts: Parts, play: RolloutSpec | None, terms: JobTerms, audit: Audit | None
) -> Learner | None:
    """Return a learner that begins at the newest checkpoint; None: the job does not train, and calls may begin."""
    fresh = {} if run.trainer is None else algorithms_of(run.config, play, terms.own_code)
    await _create_policies(run, fresh, terms.weights)
    if parts.renewable is not None:
        await run.engine.pause()
    if run.trainer is not None:
        return await _learner(run, fresh, terms, audit)
    if terms.scored is not None:
        await _first_versions(run)
    await run.engine.resume()
    return None


async def _close(parts: Parts) -> None:
    """Close the engine and the trainer of a job; one that is stuck is left to the end of the process."""
    await _closed("engine", parts.engine.close())
    for runtime in parts.policies.runtimes.values():
        runtime.grammars.close()
    if parts.trainer is not None:
        await _closed("trainer", parts.trainer.close())


async def _closed(part: str, closing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await closing
    except TimeoutError:
        log.error("the %s does not end; it is left behind", part)


async def _create_policies(run: OpenRun, algorithms: Mapping[str, Algorithm], weights: Mapping[str, str]) -> None:
    """Give the trainer the policies that are trained."""
    if run.trainer is not None:
        for name, algorithm in algorithms.items():
            await run.trainer.create(name, policy_spec(run.config, algorithm, name, weights))


def _numerics(config: JobConfig) -> dict[str, str]:
    """Return the numerics of a job without a base server, with its threads; {}: it computes nothing."""
    found = numerics_of(config)
    return found and found | threads_of(config)


async def _parts(config: JobConfig, terms: JobTerms, folder: RunFolder) -> tuple[Parts, BaseConnection | None]:
    """Return the parts of a job, and the connection to its base server; None: it has its own model."""
    if terms.parts is not None:
        return terms.parts, None
    if terms.scored is not None:
        config = config.model_copy(update={"kind": "inference"})  # scoring needs no trainer
    weights, places = terms.weights, terms.places
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


def _seats(config: JobConfig, store: RunStore) -> SeatBook | None:
    """Return the external players of a job's episodes, or None."""
    if config.kind != "training" or not config.seats.roles:
        return None
    return SeatBook(config.seats, config.rollout, store.episodes, store.clock, config.server.max_waiting_calls)


async def _first_versions(run: OpenRun) -> None:
    """Assign the scored models to roles with a pool; without training, a pool only has step 0."""
    roles = run.config.players
    for policy in sorted({roles.named[role] for role in roles.pools}):
        name = past_name(policy, 0)
        await run.engine.add_policy(name, policy, run.engine.version(policy), None)
        run.policies.add_past(name, policy)
    if roles.pools:
        run.store.episodes.casting = Casting(roles, run.config.seed, run.config.rollout.max_staleness)


async def serve(
    config: JobConfig, report: Report, ready: Callable[[LocalJob], None], terms: JobTerms = USUAL
) -> JobProgress:
    """Run a job in the foreground until its steps are done, or until SIGINT or SIGTERM. `ready`: called with the job
    when its data plane listens.
    """
    tune_gc()
    await in_thread(lambda: check_models(config))
    async with local_job(config, report, terms=terms) as job:
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
