"""The base servers of a cluster: starts and watches them, restarts dead ones, and ends idle ones.

`placement.sharing` assigns jobs to them. Like model servers, they outlive the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palestra.database import Notifier
from palestra.errors import NodeLost, PalestraError, StoreUnreachable, Superseded
from palestra.types.states import BaseState, check_transition
from palestra_control.jobs import BaseKind, BaseLoad, BaseRecord, JobRecord
from palestra_service.jobs.admitting import AdmittedJobs
from palestra_service.jobs.launcher import BaseOrder, Ended, Ending, Launcher, Listening, ending_of, read_ended
from palestra_service.jobs.rules import Rules
from palestra_service.placement.bases import RunningBase, WaitingForBase
from palestra_service.placement.fitting import GpuShare, Node, RunningJob, memory_limit_gib
from palestra_service.placement.placement import JobStart
from palestra_service.placement.reasons import short
from palestra_service.placement.tenants import SERVICE, Quota
from palestra_service.store import bases as stored
from palestra_service.store.control_store import ControlStore

log = logging.getLogger("palestra.control")
END_SECONDS = 30.0  # a base server without jobs has nothing to save
STEADY_SECONDS = 600.0  # a death after so long is no sign that the next one is near
MOST_DEATHS = 3  # in a row, then it is not started again
MOST_FAILED = 1000  # jobs of which it is kept why their base server went; a job beyond that is placed once more
CLOSE_SECONDS = 30.0  # how long a scheduler that is stopped may take to clear up starts that it breaks off
AGAIN_SECONDS = 5.0  # until a store that does not answer is asked again, and before a third start in a row


@dataclass(slots=True, eq=False)
class _Base:
    """A base server that has not ended.

    Attributes:
        idle_since: Unix seconds without jobs; None: it has jobs, or does not serve.
    """

    record: BaseRecord
    devices: tuple[GpuShare, ...]
    admitted: AdmittedJobs
    load: BaseLoad = field(default_factory=BaseLoad)
    idle_since: float | None = None


class BaseServers:
    """The base servers for jobs with `base = "shared"`."""

    def __init__(
        self,
        store: ControlStore,
        launcher: Launcher,
        jobs: Path,
        rules: Rules,
        changed: Notifier,
        stop_job: Callable[[str], None],
    ) -> None:
        """Begin without base servers, which `adopt` finds. `stop_job` stops a job, which is then queued again."""
        self._store, self._launcher, self._rules, self._changed = store, launcher, rules, changed
        self._jobs, self._folder, self._stop_job = jobs, jobs.with_name("bases"), stop_job
        self.nodes: list[Node] = []
        self._bases: dict[str, _Base] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Task[None]] = {}
        self._failed_kinds: dict[BaseKind, str] = {}
        self._failed_jobs: dict[str, str] = {}

    # For decisions

    @property
    def records(self) -> list[tuple[BaseRecord, BaseLoad]]:
        """Return every base server that has not ended, and its load."""
        return [(base.record, base.load) for base in self._bases.values()]

    def tenants_on(self, base_id: str) -> list[str]:
        """Return the tenant of each job on a base server."""
        return [job.tenant for job in self._bases[base_id].admitted.jobs]

    def running(self) -> list[RunningBase]:
        """Return the base servers for placement."""
        return [_as_running(base) for base in self._bases.values()]

    def held(self) -> list[RunningJob]:
        """Return the base servers' resources on their nodes."""
        return [base.held for base in self.running()]

    def take_failures(self, shared: Mapping[str, WaitingForBase]) -> dict[str, str]:
        """Return why queued jobs cannot have a base server whose start failed; later jobs try again."""
        kinds, self._failed_kinds = self._failed_kinds, {}
        found = {job_id: kinds[one.kind] for job_id, one in shared.items() if one.kind in kinds}
        return found | {job_id: self._failed_jobs.pop(job_id) for job_id in shared if job_id in self._failed_jobs}

    # Jobs

    def hold(self, job: JobRecord, base_id: str) -> None:
        """Count a job that starts or already runs on a base server."""
        base = self._bases[base_id]
        base.admitted.add(job)
        base.idle_since = None

    async def admit(self, job_id: str, base_id: str, quotas: Mapping[str, Quota]) -> tuple[str, Path]:
        """Return a base server's address and a new key file of a job. Raises NodeLost if the base server has ended."""
        base = self._bases.get(base_id)
        if base is None or base.record.address is None:
            raise NodeLost("its base server is gone; it waits for another one")
        key = await asyncio.to_thread(base.admitted.give_key, job_id)
        await asyncio.to_thread(base.admitted.write, quotas)
        return base.record.address, key

    def release(self, job_id: str) -> None:
        """Remove a job that is no longer live; `refresh` then revokes its key."""
        for base in self._bases.values():
            if base.admitted.remove(job_id):
                self._look_idle(base)
                self._changed.notify()

    async def refresh(self, quotas: Mapping[str, Quota]) -> None:
        """Revoke the keys of ended jobs, and update the shares of others."""
        for base in list(self._bases.values()):
            await self._store.confirmed()
            await asyncio.to_thread(base.admitted.write, quotas)

    # Base servers

    async def adopt(self, live: Iterable[JobRecord], devices: Callable[[str, Any], tuple[GpuShare, ...]]) -> None:
        """Watch the base servers of an earlier scheduler again. `devices` returns some GPUs that one may use."""
        for record in await self._store.read(stored.all_bases):
            if record.base_id in self._bases:
                continue
            base = self._added(record, devices(record.node, record.resources))
            for job in live:
                if job.base_id == record.base_id:
                    await asyncio.to_thread(base.admitted.find_key, job)
            self._run(base, self._find(base))

    async def readmit(self, job: JobRecord) -> None:
        """Count a running job, unless it is counted."""
        base = self._bases.get(job.base_id or "")
        if base is not None and job.job_id not in {known.job_id for known in base.admitted.jobs}:
            await asyncio.to_thread(base.admitted.find_key, job)
            base.idle_since = None

    def start(self, kind: BaseKind, start: JobStart) -> None:
        """Start a base server where placement has found space."""
        now = self._store.clock.now()
        record = BaseRecord(
            base_id=f"base-{secrets.token_hex(8)}",
            kind=kind,
            state=BaseState.LOADING,
            reason=f"starting on node {short(start.node_id)}",
            node=start.node_id,
            resources=self._rules.bases.resources,
            address=None,
            created_at=now,
            changed_at=now,
            starts=1,
        )
        base = self._added(record, start.devices)
        self._run(base, self._live(base, None))

    def end(self, base_id: str, reason: str) -> None:
        """End a base server without jobs."""
        base = self._bases[base_id]
        base.idle_since = None
        base.record = self._moved(base, BaseState.ENDING, reason)
        self._ends[base_id] = asyncio.create_task(self._end(base))

    async def close(self) -> None:
        """Stop watching; the base servers continue."""
        tasks = [*self._lives.values(), *self._ends.values()]
        for task in tasks:
            task.cancel()
        if tasks:  # one that waits for a database that does not answer is left to the next scheduler
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    def _run(self, base: _Base, life: Coroutine[Any, Any, None]) -> None:
        base_id = base.record.base_id
        task = self._lives[base_id] = asyncio.create_task(life)
        task.add_done_callback(lambda done: self._lived(base_id, done))

    def _lived(self, base_id: str, done: asyncio.Task[None]) -> None:
        """Log a coroutine's failure, and forget its base server, which `adopt` then finds again."""
        if not done.cancelled() and (error := done.exception()) is not None:
            if not isinstance(error, Superseded):
                log.error("base server %s: %s: %s", base_id, type(error).__name__, error, exc_info=error)
            self._bases.pop(base_id, None)
            self._lives.pop(base_id, None)

    def _added(self, record: BaseRecord, devices: tuple[GpuShare, ...]) -> _Base:
        admitted = AdmittedJobs(self._folder / record.base_id, self._jobs)
        base = self._bases[record.base_id] = _Base(record, devices, admitted)
        return base

    async def _find(self, base: _Base) -> None:
        """Watch an earlier scheduler's base server, or restart it for its jobs."""
        await self._store.confirmed()  # `find` cleans up after a server that is gone
        found = await self._launcher.find(base.record.base_id)
        if base.record.state is BaseState.ENDING or (found is None and not base.admitted.jobs):
            await self._stop(base)
            await self._forget(base)
            return
        if found is None and base.record.state is BaseState.SERVING:
            await self._become(base, BaseState.LOADING, "it was gone; its jobs go on when it is there again")
        await self._live(base, found)

    async def _live(self, base: _Base, found: Listening | None) -> None:
        """Run a base server's life cycle, from its start or discovery to its end, with restarts."""
        base_id, deaths = base.record.base_id, 0
        await self._save(base)
        while True:
            try:
                ended, served_seconds = await self._serve(base, found)
            except NodeLost as error:
                log.warning("base server %s of %s: %s", base_id, base.record.kind.model, error)
                self._stop_jobs(base)
                break
            if base.record.state is BaseState.ENDING:
                break
            deaths = 1 if served_seconds > STEADY_SECONDS else deaths + 1
            reason = ended.reason or "its process is gone"
            log.warning("base server %s of %s: %s", base_id, base.record.kind.model, reason)
            if base.record.state is BaseState.SERVING and not base.admitted.jobs:
                break
            if ended.ending is Ending.FAILED or deaths >= MOST_DEATHS:
                self._give_up(base, reason)
                break
            if base.record.state is BaseState.SERVING:
                await self._become(base, BaseState.LOADING, f"{reason}; it is started again, and its jobs wait")
            base.record, found = replace(base.record, starts=base.record.starts + 1), None
            if deaths > 1:
                await asyncio.sleep(AGAIN_SECONDS)
        await self._forget(base)

    async def _serve(self, base: _Base, found: Listening | None) -> tuple[Ended, float]:
        """Start a base server unless it was found, watch it, and return how it ended and for how long it served."""
        base_id = base.record.base_id
        try:
            if found is None:
                order = await self._order(base)
                await self._store.confirmed()
                found = await self._launcher.start(order)
        except (NodeLost, Superseded):
            raise
        except PalestraError as error:
            return Ended(ending=ending_of(error), reason=str(error)), 0.0
        since = self._store.clock.now()
        if base.record.state is BaseState.LOADING:
            await self._become(base, BaseState.SERVING, "it listens", found.url)
        self._look_idle(base)
        self._changed.notify()
        ended = await self._launcher.ended(base_id, lambda load: self._heard(base, load))
        base.load = BaseLoad()
        if ended.ending is Ending.LOST:  # its process may have written how it ended before it died
            written = await asyncio.to_thread(read_ended, base.admitted.folder)
            ended = ended if written is None else written
        return ended, self._store.clock.now() - since

    async def _order(self, base: _Base) -> BaseOrder:
        record, limits = base.record, self._rules.bases
        await asyncio.to_thread(base.admitted.prepare)
        node = next((node for node in self.nodes if node.node_id == record.node), None)
        return BaseOrder(
            job_id=record.base_id,
            model=self._rules.weights(record.kind.model) or record.kind.model,
            deterministic=record.kind.deterministic,
            folder=base.admitted.folder,
            jobs=self._jobs,
            node=record.node,
            resources=record.resources,
            dtype=limits.dtype,
            slots=limits.slots,
            address=record.address,
            memory_gib=None if node is None else memory_limit_gib(record.resources, node),
        )

    async def _end(self, base: _Base) -> None:
        await self._save(base)
        while True:
            try:
                await self._stop(base)
                return
            except Superseded:
                return
            except PalestraError as error:
                log.error("base server %s could not be stopped, tried again: %s", base.record.base_id, error)
                await asyncio.sleep(AGAIN_SECONDS)

    async def _stop(self, base: _Base) -> None:
        await self._store.confirmed()
        await self._launcher.stop(base.record.base_id, END_SECONDS)

    def _give_up(self, base: _Base, reason: str) -> None:
        """Fail the jobs of a base server that cannot be started or kept alive."""
        text = f"the base server of {base.record.kind.model} could not go on: {reason}"
        self._failed_kinds[base.record.kind] = text
        self._failed_jobs |= dict.fromkeys((job.job_id for job in base.admitted.jobs), text)
        for job_id in list(self._failed_jobs)[:-MOST_FAILED]:  # those that were cancelled meanwhile are never asked for
            del self._failed_jobs[job_id]
        self._stop_jobs(base)

    def _stop_jobs(self, base: _Base) -> None:
        """Stop the jobs of a base server that does not come back."""
        for job in base.admitted.jobs:
            self._stop_job(job.job_id)

    def _heard(self, base: _Base, load: BaseLoad) -> None:
        before, base.load = base.load.waiting, load
        if (before > self._rules.bases.waiting) != (load.waiting > self._rules.bases.waiting):
            self._changed.notify()

    def _look_idle(self, base: _Base) -> None:
        """Note since when a base server has had no job."""
        if base.record.state is BaseState.SERVING and not base.admitted.jobs:
            base.idle_since = self._store.clock.now()

    def _moved(self, base: _Base, state: BaseState, reason: str) -> BaseRecord:
        check_transition(f"base server {base.record.base_id}", base.record.state, state)
        return replace(base.record, state=state, reason=reason, changed_at=self._store.clock.now())

    async def _become(self, base: _Base, state: BaseState, reason: str, address: str | None = None) -> None:
        """Change the state of a base server, and write that down."""
        base.idle_since = None
        base.record = self._moved(base, state, reason)
        if address is not None:
            base.record = replace(base.record, address=address)
        await self._save(base)

    async def _save(self, base: _Base) -> None:
        await self._written(lambda connection: stored.put(connection, base.record))

    async def _forget(self, base: _Base) -> None:
        base_id = base.record.base_id
        await self._written(lambda connection: stored.remove(connection, base_id))
        await asyncio.to_thread(base.admitted.clear)
        self._bases.pop(base_id, None)
        self._lives.pop(base_id, None)
        self._ends.pop(base_id, None)
        self._changed.notify()

    async def _written(self, operation: Callable[[Any], None]) -> None:
        """Write to the store, and retry while it does not answer."""
        while True:
            try:
                await self._store.write(operation)
                return
            except StoreUnreachable as error:
                log.error("a base server could not be written down, tried again: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)


def _as_running(base: _Base) -> RunningBase:
    record = base.record
    held = RunningJob(
        job_id=record.base_id,
        tenant=SERVICE,
        submitted_at=record.created_at,
        needs=record.resources,
        node_id=record.node,
        devices=base.devices,
        since=record.created_at,
        starting=record.state is BaseState.LOADING,
    )
    return RunningBase(
        base_id=record.base_id,
        kind=record.kind,
        state=record.state,
        jobs=len(base.admitted.jobs),
        adapters=base.admitted.adapters,
        waiting=base.load.waiting,
        idle_since=base.idle_since,
        held=held,
    )
