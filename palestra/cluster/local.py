"""One job in one process: store, engine, trainer, learner, and the data plane on a port."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import uvicorn
import uvloop
from pydantic import ValidationError

from palestra.client.protocol import LONGEST_PAUSE_SECONDS
from palestra.cluster.parts import build_parts
from palestra.config import JobConfig
from palestra.errors import ConfigError, PalestraError
from palestra.gateway import DataPlane, KeyRing, create_app
from palestra.learner import Learner, RunFolder
from palestra.ledger import RunStore
from palestra.schemas.progress import JobProgress
from palestra.schemas.records import Task
from palestra.schemas.states import JobState
from palestra.schemas.wire import TaskBody, task_id_of
from palestra.session import PolicyRuntime, SessionContext, Sessions
from palestra.threads import in_thread

log = logging.getLogger("palestra")
T = TypeVar("T")
LINGER_SECONDS = 10.0  # how long workers may take to hear that the job is over
BACKLOG = 4096
RETURN_SECONDS = LONGEST_PAUSE_SECONDS + 0.5  # after a restart, all workers of before have tried again by then
Report = Callable[[str, dict[str, Any]], None]


def resolve_run_dir(config: JobConfig, resume: bool) -> JobConfig:
    """Fix the run's folder: the one configured, or a new `runs/<name>`, `runs/<name>-2`, …

    Raises:
        ConfigError: the folder has a run already and `resume` is False, or has none and it is True.
    """
    if config.run_dir is None:
        number, folder, newest = 1, config.folder, None
        while (folder / "run.db").exists():
            newest, number = folder, number + 1
            folder = config.folder.with_name(f"{config.name}-{number}")
        config = config.model_copy(update={"run_dir": newest if resume and newest else folder})
    known = (config.folder / "run.db").exists()
    if known and not resume:
        raise ConfigError(
            f"{config.folder} has a run already; add --resume to go on with it, or choose another run_dir"
        )
    if resume and not known:
        raise ConfigError(f"{config.folder} has no run to go on with; leave --resume out to start one")
    return config


class LocalJob:
    """A running job: what its owner may look at and do."""

    def __init__(self, learner: Learner, plane: DataPlane, url: str, folder: RunFolder, resumed: bool) -> None:
        self._learner, self.plane, self.url, self.folder = learner, plane, url, folder
        self._all_back_at = time.monotonic() + (RETURN_SECONDS if resumed else 0.0)
        self.over = asyncio.Event()  # set when nothing more will be trained

    @property
    def progress(self) -> JobProgress:
        """Where the job stands."""
        return self.plane.progress

    @property
    def api_key(self) -> str:
        """The job's key."""
        return self.plane.keys.job_key

    def stop(self) -> None:
        """Finish or drop the present step, save, and end."""
        self._learner.stop()

    async def run(self) -> None:
        """Train until the steps are done; on failure the job's state says why."""
        try:
            await self._learner.run()
        except PalestraError as error:
            await self._failed(error)
            raise
        finally:
            self.over.set()

    async def _failed(self, error: PalestraError) -> None:
        try:
            await self.plane.store.add_event("failed", {"reason": str(error)})  # first: who follows hears the reason
        finally:
            if not self.progress.over:
                self.progress.move(JobState.FAILED, str(error))
            self.plane.store.available.ring()

    async def linger(self) -> None:
        """Let workers that are still there hear that the job is over, for a while."""
        until = time.monotonic() + LINGER_SECONDS
        while self.progress.over and time.monotonic() < until:
            if self.plane.attendance.complete and time.monotonic() >= self._all_back_at:
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def local_job(config: JobConfig, report: Report) -> AsyncIterator[LocalJob]:
    """Open a job and serve its data plane; nothing is trained until `run` is called.

    Raises:
        ConfigError: the port is in use, the folder belongs to a running job, or the configuration can't be met.
        ModelError: missing weights.
    """
    folder = RunFolder(config.folder)
    resumed = folder.store.exists()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(folder.path))
        listener = stack.enter_context(_listen(config.server.host, config.server.port))
        parts = await in_thread(lambda: build_parts(config))  # not in a pool's: see there
        if resumed:
            await parts.engine.pause()  # until the learner has given it the weights that the run had come to
        store = stack.enter_context(RunStore(folder.store, config.rollout, config.store))
        store.policy_name = config.policy_name
        try:
            await _load_tasks(store, config)
            runtime = PolicyRuntime(
                config=config.policy,
                renderer=parts.renderer,
                engine=parts.engine,
                stop_ids=frozenset(parts.renderer.get_stop_token_ids()),
                decode=parts.decode,
            )
            context = SessionContext(
                store=store,
                policies={config.policy_name: runtime},
                seed=config.seed,
                strict_history=config.rollout.strict_history,
                keep_dropped_reasoning=config.rollout.dropped_reasoning == "keep",
            )
            progress = JobProgress(job=config.name, steps=config.steps, run_dir=str(folder.path))
            keys = KeyRing(_secret(folder.path), config.name, os.environ.get("PALESTRA_API_KEY"))
            _write_private(folder.path / "api_key", keys.job_key + "\n")
            plane = DataPlane(
                config=config,
                store=store,
                sessions=Sessions(context, config.server.max_waiting_calls),
                keys=keys,
                progress=progress,
                started_at=time.time(),
            )
            learner = Learner(config, store, parts.trainer, parts.engine, folder, progress, report)
            host, port = listener.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            async with _served(plane, listener), _reaper(store):
                yield LocalJob(learner, plane, url, folder, resumed)
        finally:
            await parts.engine.close()
            await parts.trainer.close()


async def _load_tasks(store: RunStore, config: JobConfig) -> None:
    """Tasks from files, if the job names any."""
    if config.tasks.train is None or await store.tasks_sealed():
        return
    for split, path in (("validation", config.tasks.validation), ("train", config.tasks.train)):
        if path is not None:
            await store.push_tasks(split, read_tasks(path), f"file {path.name}")
    await store.seal_tasks()


def read_tasks(path: Path) -> list[Task]:
    """A JSONL file: an object a line; its key `id`, if it has one, names the task.

    Raises:
        ConfigError: no such file, or a line that is no JSON object; the line is named.
    """
    try:
        with path.open("rb") as file:
            return [_task(line, f"{path}:{number}") for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"tasks file {path}: {error.strerror}") from error


def _task(line: bytes, place: str) -> Task:
    try:
        data = json.loads(line.decode())
        if not isinstance(data, dict):
            raise TypeError(f"a task is a JSON object, this is a {type(data).__name__}")
        name = data.pop("id", None)
        body = TaskBody(id=None if name is None else str(name), data=data)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON: {error.msg}") from error
    except ValidationError as error:
        raise ConfigError(f"{place}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    except (UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from error
    return Task(task_id=task_id_of(body), data=data)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)  # at once: until one listens, two servers can have the same address
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} can't be listened on ({error.strerror or error}); set server.port, or 0 for any free port"
        ) from error
    return listener


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process a run."""
    lock: IO[str] = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(f"another process is running the job in {folder}") from error
    try:
        yield
    finally:
        lock.close()


def _secret(folder: Path) -> bytes:
    """What the run's keys are derived from; made once, readable by its owner only."""
    path = folder / "secret"
    if not path.exists():
        _write_private(path, secrets.token_hex(32) + "\n")
    return bytes.fromhex(path.read_text().strip())


def _write_private(path: Path, text: str) -> None:
    """Write a file whole or not at all, with mode 600."""
    temporary = path.with_name(f".{path.name}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@asynccontextmanager
async def _served(plane: DataPlane, listener: socket.socket) -> AsyncIterator[None]:
    settings = uvicorn.Config(
        create_app(plane),
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not (server.started or task.done()):  # uvicorn has no event for it
            await asyncio.wait((task,), timeout=0.01)
        yield
    finally:
        plane.stop()
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the job's owner decides what SIGINT means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


@asynccontextmanager
async def _reaper(store: RunStore) -> AsyncIterator[None]:
    """Gives back episodes whose leases ran out."""

    async def reap() -> None:
        while True:
            await asyncio.sleep(0.25)
            try:
                await store.expire_leases()
            except PalestraError as error:  # the worker was quicker: it ended the episode meanwhile
                log.debug("%s", error)

    task = asyncio.create_task(reap())
    try:
        yield
    finally:
        task.cancel()


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on the faster event loop, for the threads and processes that serve."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def serve(config: JobConfig, report: Report, ready: Callable[[LocalJob], None]) -> JobProgress:
    """Run a job in the foreground until its steps are done, or SIGINT or SIGTERM. `ready` is told when it listens."""
    gc.freeze()  # this process is ours: what was imported is not looked at again
    gc.set_threshold(50_000, 20, 10)  # recorded calls are many small objects, and hardly any of them is in a cycle
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
