"""The Tinker API of one process, without HTTP: sessions, models, samplers, and the results of requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from palestra.config import AdapterConfig
from palestra.database import Database
from palestra.errors import Conflict, Forbidden, StoreError
from palestra.threads import in_thread
from palestra.trainer.base import Trainer
from palestra.types.clock import Clock, SystemClock
from palestra.waiting import cancelled
from palestra_bases.tinker.bases import Bases
from palestra_bases.tinker.copies import Copies
from palestra_bases.tinker.journal import Completion, Journal
from palestra_bases.tinker.models import Models
from palestra_bases.tinker.records import SAMPLER, SCHEME, TRAINING, Checkpoint, FutureRequest, TinkerLimits
from palestra_bases.tinker.samples import Samples, Sampling
from palestra_bases.tinker.saved import Saved
from palestra_bases.tinker.sessions import TinkerSessions
from palestra_bases.tinker.tables import PENDING
from palestra_bases.tinker.training import TinkerContext, check_ttl, files_of, usable


class Futures:
    """Notifies waiting callers when a request has a result."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def settled(self, name: str) -> None:
        """Wake callers that wait for a finished request, or for any of a sampler."""
        for waiter in self._waiting.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def result(self, tenant: str, request_id: str, seconds: float) -> FutureRequest:
        """Return a request with its result, or without one after a timeout."""
        with self._waiter(request_id) as waiter:
            found = await self._journal.request(tenant, request_id)
            if found.state != PENDING:
                return found
            await _wait(waiter, seconds)
            return await self._journal.request(tenant, request_id)

    async def completions(self, sampler_id: str, clone: int, after: int, seconds: float) -> list[Completion]:
        """Return a sampler's requests with results, waiting for a new one; see `Journal.completions`."""
        with self._waiter(sampler_id) as waiter:
            if found := await self._journal.completions(sampler_id, clone, after):
                return found
            await _wait(waiter, seconds)
        return await self._journal.completions(sampler_id, clone, after)

    @contextlib.contextmanager
    def _waiter(self, name: str) -> Iterator[asyncio.Future[None]]:
        """Yield a future that `settled` sets; created before reading, so that no result in between is missed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(waiter)
        try:
            yield waiter
        finally:
            known = self._waiting.get(name)
            if known is not None:
                known.discard(waiter)
                if not known:
                    del self._waiting[name]


async def _wait(waiter: asyncio.Future[None], seconds: float) -> None:
    """Return when a future is set, or after some time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiter


log = logging.getLogger("palestra.tinker")
SWEEP_SECONDS = 30.0  # between two looks for what has expired
IMPORTED = "imported:train:0"  # stands in paths for checkpoints that the operator has brought


class TinkerService:
    """Everything behind the routes."""

    def __init__(
        self,
        trainer_of: Callable[[str], Trainer],
        sampling: Sampling,
        bases: Bases,
        db: Database,
        folder: Path,
        limits: TinkerLimits,
        clock: Clock | None = None,
    ) -> None:
        """Assemble the parts. `trainer_of` returns a tenant's trainer without policies, which keeps all checkpoints."""
        known = clock or SystemClock()
        self.journal, self.sessions, self.saved = Journal(db, known), TinkerSessions(db, known), Saved(db, known)
        self.futures, self.bases, self.limits = Futures(self.journal), bases, limits
        self._clock = known
        self._tasks: set[asyncio.Task[None]] = set()
        context = TinkerContext(
            trainer_of=trainer_of,
            bases=bases,
            journal=self.journal,
            sessions=self.sessions,
            saved=self.saved,
            limits=limits,
            folder=folder,
            settled=self.futures.settled,
            spawn=self._spawn,
        )
        self.models, self.samples, self.copies = Models(context), Samples(sampling, context), Copies(context)
        self._failure: asyncio.Future[StoreError] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Execute acknowledged requests from before the restart, and begin to remove what expires."""
        await self.sessions.restarted()
        for request in await self.journal.pending():
            if request.kind == "sample":
                self.samples.start(await self.journal.with_body(request.request_id))
            else:
                self.models.notify(await self.sessions.model(request.tenant, request.target))
        self._spawn("sweep", self._sweep_for_ever())

    async def stop(self) -> None:
        """Stop, and write a checkpoint of each model in memory."""
        models = self.models.in_memory()
        await cancelled(*self._tasks)
        for model in models:
            await model.unload()

    async def failed(self) -> None:
        """Wait until the journal cannot be written, which ends the server, and raise the reason."""
        raise await self._failure

    # Sessions.

    async def create_session(self, tenant: str, data: Mapping[str, Any]) -> str:
        """Begin a session of a tenant, and return its id."""
        return await self.sessions.add_session(tenant, data, self.limits)

    async def heartbeat(self, tenant: str, session_id: str) -> bool:
        """Keep a session alive. False: it has ended."""
        if (await self.sessions.session(tenant, session_id)).finished_at is not None:
            return False
        await self.sessions.touch_session(session_id)
        return True

    async def finish_session(self, tenant: str, session_id: str) -> None:
        """End a session: unload its models, and remove its unnamed samplers."""
        await self.sessions.session(tenant, session_id)
        await self.sessions.touch_session(session_id, finished=True)
        await self._end_session(tenant, session_id)

    # Checkpoints.

    async def delete_checkpoint(self, tenant: str, path: str) -> None:
        """Delete a checkpoint. Raises Forbidden if it is the operator's."""
        await self._remove(await self._own(tenant, path))

    async def set_ttl(self, tenant: str, path: str, seconds: int | None) -> None:
        """Set a checkpoint's TTL; None: unlimited. Raises Forbidden: the operator's; InvalidRequest: out of range."""
        check_ttl(seconds)
        await self._own(tenant, path)
        await self.saved.set_expiry(path, None if seconds is None else self._clock.now() + seconds)

    async def publish(self, tenant: str, path: str, public: bool) -> None:
        """Let all tenants use a checkpoint, or only its own. Raises Forbidden: not its tenant; Conflict: no change."""
        found = await self._own(tenant, path)
        if found.public == public:
            raise Conflict(f"the checkpoint {path} is {'public' if public else 'private'} already")
        await self.saved.set_public(path, public)

    async def _own(self, tenant: str, path: str) -> Checkpoint:
        found = await usable(self.saved, tenant, path)
        if found.tenant != tenant:
            raise Forbidden(f"{path} belongs to another, who lets all tenants use it; they can't change it")
        return found

    async def _remove(self, checkpoint: Checkpoint) -> None:
        await self.saved.remove_checkpoint(checkpoint.path)
        await self.samples.remove(checkpoint.folder)
        if checkpoint.kind == "training":  # each of which has a folder of its own around it
            await in_thread(lambda: shutil.rmtree(files_of(checkpoint), ignore_errors=True))

    async def bring(self, name: str, folder: Path, adapter: AdapterConfig, base: str) -> list[str]:
        """Let all tenants use an adapter in PEFT's format, which stays where it is; return its paths."""
        paths = []
        for kind in (TRAINING, SAMPLER):
            path = f"{SCHEME}{IMPORTED}/{kind}/{name}"
            paths.append(path)
            brought = Checkpoint(
                path=path,
                tenant="",
                model_id=IMPORTED,
                name=f"{kind}/{name}",
                folder=folder,
                base=self.bases.of(base).name,
                adapter=adapter,
                data={},
                step=0,
                bytes=0,
                created_at=self._clock.now(),
                expires_at=None,
                user_metadata=None,
            )
            await self.saved.write(self.saved.insert_checkpoint(brought))
        return paths

    # What is done beside requests.

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            found = error if isinstance(error, StoreError) else StoreError(f"{task.get_name()} failed: {error!r}")
            self._failure.set_result(found)

    async def _sweep_for_ever(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Remove expired and unreachable data."""
        for checkpoint in await self.saved.expired():
            await self._remove(checkpoint)
        silent = self.limits.silent_seconds
        for _, session_id in await self.sessions.dead(silent):
            await self.samples.drop(session_id, f"the session had no heartbeat for {silent:g} s")
        for tenant, session_id in await self.sessions.dead(self.limits.session_seconds):
            await self._end_session(tenant, session_id)
        await self.journal.forget_results(self.limits)
        for _, model_id in await self.sessions.unused(self.limits.kept_seconds):
            await self.models.unload(model_id)
        await self.sessions.forget(self.limits.kept_seconds)

    async def _end_session(self, tenant: str, session_id: str) -> None:
        """Take a session's models out of memory, and remove its samplers."""
        for record in await self.sessions.models(tenant, session_id):
            await self.models.unload(record.model_id)
        await self.samples.end_session(session_id)
