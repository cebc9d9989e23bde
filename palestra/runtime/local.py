"""One job in one process: store, engine, trainer and learner (if it trains), and the data plane on a port."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

from palestra.agents import ModelAgent
from palestra.algorithms.base import Algorithm
from palestra.algorithms.registry import create_algorithm
from palestra.client.protocol import LONGEST_PAUSE_SECONDS
from palestra.config import JobConfig, past_name
from palestra.config.engine import PooledEngineConfig
from palestra.engine.base import Engine
from palestra.envs.task_splits import Split
from palestra.errors import ConfigError, EngineFailure, PalestraError, StoreError
from palestra.faults import fault_point
from palestra.http.server import listen, served, url_of
from palestra.learner import Learner, RunFolder, policy_spec
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.pictures.stored import StoredPictures
from palestra.rollout import RolloutSpec, RolloutSyncLock
from palestra.runners import Runner, RunnerPool
from palestra.runtime.engine_pool import pooled_parts
from palestra.runtime.environments import environment_of
from palestra.runtime.gpus import gpus_of_job
from palestra.runtime.page import create_job_app
from palestra.runtime.parts import Parts, build_parts
from palestra.runtime.renewal import Renewal
from palestra.runtime.role_check import agents_of, check_roles
from palestra.runtime.run_dir import starting_in
from palestra.runtime.runner_fleet import RunnerFleet, RunnerOrder, RunnerStarter
from palestra.runtime.runner_process import start_process
from palestra.runtime.serving import Scoring, Serving
from palestra.runtime.shared_base import BaseConnection, connect_base
from palestra.runtime.tasks import load_tasks, read_files
from palestra.runtime.watchdog import Watchdog
from palestra.server import DataPlane, KeyRing
from palestra.session import Sameness, SeatBook, SessionContext, Sessions
from palestra.store import RunStore, open_run_store
from palestra.store.casting import Casting
from palestra.store.key_files import SecretFile, publish_key
from palestra.threads import in_thread
from palestra.tracking.launch import tracking
from palestra.tracking.registry import check_trackers
from palestra.trainer.base import Trainer
from palestra.types.progress import JobProgress, Phase, PhaseProgress
from palestra.types.records import Task
from palestra.types.states import JobState
from palestra.waiting import cancelled, race

log = logging.getLogger("palestra")
T = TypeVar("T")
MOST_AT_ONCE = 256  # episodes played concurrently, unless the job sets another number
LINGER_SECONDS = 10.0  # limit for notifying workers that the job is over
CLOSE_SECONDS = 120.0  # limit for ending the engine, and the trainer
RETURN_SECONDS = LONGEST_PAUSE_SECONDS + 0.5  # after a restart, all earlier workers have retried within this time
Report = Callable[[str, dict[str, Any]], None]


class LocalJob:
    """A running job, with what its owner may see and do."""

    def __init__(
        self,
        work: Learner | Serving | Scoring,
        plane: DataPlane,
        engine: Engine,
        url: str,
        folder: RunFolder,
        resumed: bool,
        pool: RunnerPool | None,
        renewal: Renewal | None = None,
        fleet: RunnerFleet | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Assemble a job; `run` runs it.

        Args:
            work: trains, serves or scores.
            plane: the state of the job's data plane.
            engine: the engine that samples.
            url: URL of the data plane.
            folder: files of the run.
            resumed: whether workers of an earlier process may come back.
            pool: plays episodes in this process; None: no episodes are played here.
            renewal: what is done when what trains the job is lost; None: that ends with this process.
            fleet: processes that play the job's environment; None: it has none.
            watchdog: ends the job when it is stuck; None: nothing is trained.
        """
        self._fleet, self._watchdog = fleet, watchdog
        self._renewal, self._stopping = renewal, False
        self._work, self.plane, self.url, self.folder = work, plane, url, folder
        self._engine, self._pool = engine, pool
        self._all_back_at = time.monotonic() + (RETURN_SECONDS if resumed else 0.0)
        self.over = asyncio.Event()  # set when `run` has ended

    @property
    def progress(self) -> JobProgress:
        """Return the job's progress, which is updated while the job runs."""
        return self.plane.progress

    @property
    def plays_itself(self) -> bool:
        """Return whether this process plays the episodes, or runners of its own do."""
        return self._pool is not None or self._fleet is not None

    @property
    def api_key(self) -> str:
        """Return the job's present key, which opens its data plane."""
        return self.plane.keys.job_key

    def stop(self) -> None:
        """Make the job save and end, after finishing or dropping the present step; end the serving of a model."""
        self._stopping = True
        self._work.stop()

    async def run(self) -> None:
        """Train until the steps are done, or serve until `stop`; after a failure the job's state says why."""
        try:
            await self._play_and_work()
        except PalestraError as error:
            await self._failed(error)
            raise
        finally:
            self.over.set()
            if self.plane.sessions.seats is not None:
                self.plane.sessions.seats.wake()

    async def _play_and_work(self) -> None:
        """Run the work, the runners if there are any, and the watches of engine and store; an error in one ends all."""
        parts: list[Coroutine[Any, Any, None]] = [self._work_on(), self._engine_failed(), self._store_lost()]
        if self._pool is not None:
            parts.append(self._pool.run())
        if self._fleet is not None:
            parts.append(self._fleet.failure())
        await self._unless_stuck(asyncio.ensure_future(race(*parts)))

    async def _unless_stuck(self, work: asyncio.Future[Any]) -> None:
        """Await the work, or fail the job when the watchdog says so; what does not end then is left behind."""
        if self._watchdog is None:
            await work
            return
        watch = asyncio.create_task(self._watchdog.run())
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and isinstance(stuck := watch.exception(), PalestraError):
                await self._failed(stuck)  # first, because what is stuck may not let itself be cancelled
                work.cancel()
                await asyncio.wait((work,), timeout=CLOSE_SECONDS)
                raise stuck
            await work
        except asyncio.CancelledError:
            await cancelled(work)
            raise
        finally:
            watch.cancel()

    async def _work_on(self) -> None:
        """Run the work to its end, and begin it again whenever what trains it was lost."""
        renewal = self._renewal
        if renewal is None:
            await self._work.run()
        elif isinstance(self._work, Learner):
            while not await renewal.unless_lost(self._work.run()):
                self._work = await self._renewed(renewal) or self._work
                if self._stopping:
                    self._work.stop()
        else:
            await race(self._work.run(), self._renew_for_ever(renewal))

    async def _renew_for_ever(self, renewal: Renewal) -> None:
        while True:
            await renewal.base.lost()
            await self._renewed(renewal)

    async def _renewed(self, renewal: Renewal) -> Learner | None:
        """Begin anew, and record that."""
        text = f"{renewal.base.loss}; the job goes on from its newest checkpoint"
        self.progress.enter(text)
        await self.plane.store.log.add_event(renewal.base.event_of_loss, {"step": self.progress.step, "text": text})
        return await renewal.renew()

    async def _engine_failed(self) -> None:
        """Fail the job when the engine fails: every call would fail, and the job would wait for episodes for ever."""
        raise EngineFailure(await self._engine.failure())

    async def _store_lost(self) -> None:
        """Fail the job when the store's file was deleted: results that are handed in would be lost."""
        raise await self.plane.store.db.lost()

    async def _failed(self, error: PalestraError) -> None:
        if self.progress.over:
            return
        try:
            # Before the state changes, so that followers of events see the reason.
            await self.plane.store.log.add_event("failed", {"reason": str(error)})
        except StoreError as unrecorded:  # a full disk, perhaps, or the same error as the failure's
            if str(unrecorded) != str(error):
                log.error("why the job failed could not be recorded: %s", unrecorded)
        finally:
            self.progress.move(JobState.FAILED, str(error))
            self.plane.store.episodes.available.notify()

    async def linger(self) -> None:
        """Wait until connected workers have been notified that the job is over, for LINGER_SECONDS at most."""
        until = time.monotonic() + LINGER_SECONDS
        while self.progress.over and time.monotonic() < until:
            if self.plane.workers.all_notified and time.monotonic() >= self._all_back_at:
                return
            await asyncio.sleep(0.05)


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
    starter: RunnerStarter | None = None,
    most_replicas: int | None = None,
) -> AsyncIterator[LocalJob]:
    """Open a job and serve its data plane while the block is open. Nothing is trained until `run` is called.

    Args:
        config: the job.
        report: is called with every event of the job, and its data.
        play: what this process plays itself; None: the environment that `config.environment` names, or nothing.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name. None: none.
        scored: tasks to score the models on, once each, without training. None: the job does what its configuration
            says.
        own_code: whether `algorithm.name` may be a class of the user's own; never true in a server.
        given: splits whose tasks are pushed to the job, so that its environment makes none; see `load_tasks`.
        starter: starts the runners of `environment.runners`; None: as processes of this machine.
        most_replicas: inference workers that those who have the job's key may ask for; None: any number.

    Raises:
        ConfigError: the port is in use, the folder belongs to a running job, or the configuration can't be met.
        ModelError: weights are missing.
    """
    known = (config.folder / "run.db").exists()
    resumed = known and config.kind == "training"
    tasks = None if known or scored is not None else read_files(config)  # before the model, whose loading takes long
    trains = config.kind == "training" and scored is None
    algorithms = _algorithms(config, play, own_code) if trains else {}
    if trains and not known:
        _check_roles(config, play)
    trackers = config.tracking if trains else []
    check_trackers(trackers)
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(starting_in(config.folder))
        folder = RunFolder(config.folder)
        listener = stack.enter_context(listen(config.server.host, config.server.port))
        trained = (
            config if scored is None else config.model_copy(update={"kind": "inference"})
        )  # scoring needs no trainer
        parts, base = await _parts(trained, weights or {}, folder)
        runtimes = parts.policies.runtimes
        config = config.model_copy(update={"policies": {name: each.config for name, each in runtimes.items()}})
        if resumed:
            await parts.engine.pause()  # until the learner has published the run's weights
        store = stack.enter_context(
            open_run_store(folder.store, config.rollout, config.store, pictures=config.pictures)
        )
        try:
            if base is not None:
                await base.check_run(store.log)
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
                job=config.name, steps=config.steps, token_budget=config.token_budget, run_dir=str(folder.path)
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
            pool, lock = (None, None) if apart else _runners(config, plane.sessions, progress, play)

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
                    lock,
                )
                await made.prepare()
                return made

            async def again() -> Learner | None:
                fresh = _algorithms(config, play, own_code) if algorithms else {}
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
                served(create_job_app(plane, most_replicas), listener, plane.stop, plane.connections),
                _watched(store, progress, plane.sessions.seats),
                tracking(folder.path, trackers),
            ):
                start.succeeded = True
                renewable = base or parts.renewable
                renewal = None if renewable is None else Renewal(renewable, again)
                fleet = _fleet(config, plane, url_of(listener), starter or start_process) if apart else None
                watchdog = _watchdog(plane, work, plays_itself=pool is not None or fleet is not None)
                async with fleet or contextlib.nullcontext():
                    yield LocalJob(
                        work, plane, parts.engine, url_of(listener), folder, resumed, pool, renewal, fleet, watchdog
                    )
        finally:
            await _closed("engine", parts.engine.close())
            for runtime in runtimes.values():
                runtime.grammars.close()
            if parts.trainer is not None:
                await _closed("trainer", parts.trainer.close())


def _watchdog(plane: DataPlane, work: Learner | Serving | Scoring, *, plays_itself: bool) -> Watchdog | None:
    """Return what ends a job that is stuck; None: the job trains nothing.

    Args:
        plane: of the job.
        work: what the job does.
        plays_itself: whether runners of the job's own play its episodes.
    """
    if not isinstance(work, Learner):
        return None
    return Watchdog(plane.config.watchdog, plane, plays_itself, plane.store.clock)


async def _closed(part: str, closing: Awaitable[None]) -> None:
    """Close a part of a job; one that is stuck is left to the end of the process."""
    try:
        await asyncio.wait_for(closing, CLOSE_SECONDS)
    except TimeoutError:
        log.error("the %s does not end; it is left behind", part)


async def _create_policies(
    config: JobConfig, trainer: Trainer | None, algorithms: Mapping[str, Algorithm], weights: Mapping[str, str]
) -> None:
    """Give the trainer the policies that are trained.

    Args:
        config: the job.
        trainer: without them; None: nothing is trained.
        algorithms: of each of these policies.
        weights: see `local_job`.
    """
    if trainer is not None:
        for name, algorithm in algorithms.items():
            await trainer.create(name, policy_spec(config, algorithm, name, weights))


async def _parts(
    config: JobConfig, weights: Mapping[str, str], folder: RunFolder
) -> tuple[Parts, BaseConnection | None]:
    """Return the parts of a job, and the connection to its base server; None: it has a model of its own."""
    if config.base is not None:
        return await connect_base(config, weights)
    if isinstance(config.engine, PooledEngineConfig) and config.engine.replicas > 1:
        return await pooled_parts(config, config.engine, weights), None
    pictures = StoredPictures(Blobs(folder.store.parent / FOLDER))  # which the run's store fills
    built = await in_thread(lambda: build_parts(config, weights, pictures))  # in a thread of its own, not of a pool
    return built, None


async def _begun_again(
    config: JobConfig, parts: Parts, store: RunStore, scores: bool, learner: Callable[[], Awaitable[Learner]]
) -> Learner | None:
    """Return a learner that begins at the newest checkpoint; None: the job trains nothing, and calls may begin.

    An engine of this process waits from here on, until the learner has published the checkpoint's weights.

    Args:
        config: the job.
        parts: of the job, whose base server or trainer has its policies again.
        store: of the job.
        scores: whether the models are scored.
        learner: makes a learner.
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


def _check_roles(config: JobConfig, play: RolloutSpec | None) -> None:
    """Check that roles, seats and policies are those of the environment, where a job says anything of them.

    Raises:
        ConfigError: they are not.
    """
    if config.roles or config.seats.roles or len(config.policies) > 1:
        check_roles(config, agents_of(_environment(config, play)))


def _algorithms(config: JobConfig, play: RolloutSpec | None, own_code: bool) -> dict[str, Algorithm]:
    """Return the algorithm of each policy that is trained, by its name; the arguments are those of `local_job`.

    Raises:
        ConfigError: one can't be made, or does not fit what is played.
    """
    found: dict[str, Algorithm] = {}
    for name in config.trained_policies:
        found[name] = create_algorithm(config.algorithm_of(name), config.rollout.step_order, own_code=own_code)
        if found[name].every_choice:
            _check_choices(config, name, play)
    return found


def _environment(config: JobConfig, play: RolloutSpec | None) -> Any:
    """Return an environment of the job, or what makes one where that is the user's; None: this process plays nothing.

    Args:
        config: the job.
        play: what this process plays; None: what the configuration says.
    """
    if play is not None:
        return play.environment
    make = environment_of(config)
    return None if make is None else make()


def _check_choices(config: JobConfig, policy: str, play: RolloutSpec | None) -> None:
    """Refuse agents none of which is held to choices, for an algorithm that trains every choice.

    What workers outside of this process send is known, and looked at, when the first step is trained.

    Args:
        config: the job.
        policy: the policy that the algorithm trains.
        play: what this process plays; None: what the configuration says.

    Raises:
        ConfigError: no agent ever has choices.
    """
    environment = _environment(config, play)
    if environment is None:
        return
    # Of a function that makes environments it is not known what they give; of a class and of an environment it is.
    given = bool(getattr(environment, "gives_choices", False))
    agents = (play and play.agents) or {"": ModelAgent()}
    if not any(agent.may_choose or (isinstance(agent, ModelAgent) and given) for agent in agents.values()):
        raise ConfigError(
            f"{config.algorithm_key(policy)}.name is {config.algorithm_of(policy).name!r}, which needs replies that "
            "are held to finitely many choices, and no agent is: give one `choices`, as in "
            "RolloutSpec(agents={'agent': ModelAgent(choices=[...])})"
        )


def _runners(
    config: JobConfig, sessions: Sessions, progress: JobProgress, play: RolloutSpec | None
) -> tuple[RunnerPool | None, RolloutSyncLock | None]:
    """Return the pool that plays episodes here, if any, and the lock that keeps weights fixed during an episode."""
    chosen = config.environment
    if config.kind == "inference":
        return None, None
    if play is None and (make := environment_of(config)) is not None:
        play = RolloutSpec(environment=make, system=chosen.system)
    if play is None:
        if sessions.seats is not None:
            raise ConfigError(
                "seats.roles names agents of an environment that the server plays, and the job has none; name one in "
                "environment.name, or give it to palestra.train"
            )
        return None, None
    lock = RolloutSyncLock() if config.rollout.weight_sync == "between_episodes" else None
    pool = RunnerPool(
        sessions,
        Runner(sessions, play, algorithm_of=config.algorithm_of, timeout_seconds=chosen.timeout_seconds),
        max_concurrency=_concurrency(config),
        lock=lock,
        progress=progress.rollouts,
    )
    return pool, lock


def _concurrency(config: JobConfig) -> int:
    """Return how many episodes of a job are played at the same time."""
    due = config.rollout.group_size * config.rollout.groups_per_step * (1 + config.rollout.max_staleness)
    return config.environment.max_concurrency or min(due, MOST_AT_ONCE)


def _fleet(config: JobConfig, plane: DataPlane, url: str, starter: RunnerStarter) -> RunnerFleet | None:
    """Return the processes that play the job's environment; None: a model is served, and nothing is played.

    Args:
        config: the job.
        plane: whose key they get, and whose episodes they play.
        url: of the data plane.
        starter: starts runners.
    """
    count = config.environment.runners
    if count is None or config.kind == "inference":
        return None
    order = RunnerOrder(url=url, key=lambda: plane.keys.job_key, concurrency=-(-_concurrency(config) // count))
    return RunnerFleet(count, order, starter, plane.store, plane.progress)


@asynccontextmanager
async def _watched(store: RunStore, progress: JobProgress, seats: SeatBook | None) -> AsyncIterator[None]:
    """Expire leases, of seats too, and keep the counts of episodes up to date, while the block is open."""

    async def watch() -> None:
        counted: tuple[int, Phase | None] = (-1, None)
        said = ""
        while True:
            await asyncio.sleep(0.5)
            try:
                await store.episodes.expire_leases()
                if seats is not None:
                    seats.expire()
                if counted != (store.db.commits, progress.collecting):
                    counted = (store.db.commits, progress.collecting)
                    await _count(store, progress)
                said = ""
            except Exception as error:  # noqa: BLE001 - a full disk, perhaps: try again
                if str(error) != said:
                    said = str(error)
                    log.error("leases can't be looked after now: %s: %s", type(error).__name__, error)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        await cancelled(task)


async def _count(store: RunStore, progress: JobProgress) -> None:
    """Update the counts of episodes in `progress`."""
    progress.episodes = await store.episodes.counts()
    if (wanted := progress.collecting) is not None:
        found = PhaseProgress(*await store.groups.settled_of_step(wanted.kind, wanted.step))
        if progress.collecting == wanted:  # the same phase as before the query
            progress.collected = found


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, on uvloop, which is faster, for threads and processes that serve."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def tune_gc() -> None:
    """Make garbage collection rare, for a process that only runs a job."""
    gc.freeze()  # objects of imported modules are not examined again
    gc.set_threshold(50_000, 20, 10)  # recorded calls are many small objects, hardly any in a cycle


async def serve(config: JobConfig, report: Report, ready: Callable[[LocalJob], None]) -> JobProgress:
    """Run a job in the foreground until its steps are done, or until SIGINT or SIGTERM.

    Args:
        config: the job.
        report: is called with every event of the job, and its data.
        ready: is called with the job when its data plane listens.
    """
    tune_gc()
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
