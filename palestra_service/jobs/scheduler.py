"""The scheduler: starts jobs when resources are free, watches their servers, and records how they end.

Tokens do not pass through it. `placement.place`, a pure function, decides, and the state is in the control store. Model
servers outlive the scheduler: a restarted one finds them and continues to watch them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from palestra.database import Notifier
from palestra.errors import (
    ConfigError,
    Conflict,
    IllegalTransition,
    NodeLost,
    NotFound,
    PalestraError,
    ServerFailed,
    StoreError,
    StoreUnreachable,
    Superseded,
)
from palestra.types.gpus import GpuReading
from palestra.types.states import JobState
from palestra.waiting import race
from palestra_control.jobs import LIVE_STATES, JobRecord, ProcessResources, Resources
from palestra_service.jobs.base_servers import BaseServers
from palestra_service.jobs.budgets import TenantBudgets
from palestra_service.jobs.deadlines import Deadlines
from palestra_service.jobs.engine_rules import ServersInUse
from palestra_service.jobs.launcher import (
    LOG_FILE,
    RUN,
    Ended,
    Ending,
    Launcher,
    Listening,
    ending_of,
    following_state,
    log_tail,
    read_ended,
)
from palestra_service.jobs.orders import order_of
from palestra_service.jobs.rules import Rules
from palestra_service.jobs.shared_jobs import KnownKinds, by_base
from palestra_service.placement.bases import part_of_base
from palestra_service.placement.fitting import GpuShare, Node, PlacedBundle, RunningJob, counted, devices_left
from palestra_service.placement.placement import JobStart, PlacementPolicy
from palestra_service.placement.reasons import never_starts, short
from palestra_service.placement.sharing import Cluster, no_room, place_all
from palestra_service.placement.tenants import Quota
from palestra_service.store import decisions
from palestra_service.store.control_store import ControlStore

log = logging.getLogger("palestra.control")
LOOK_SECONDS = 5.0  # machines come and go without a notification, and failures are tried again after this time
ROUND_SECONDS = 30.0  # a round that takes longer is reported as a problem
CLOSE_SECONDS = 30.0  # how long a scheduler that is stopped may take to clear up starts that it breaks off
NOTE_SECONDS = 5.0  # how long a scheduler that is stopped may take to record endings


class JobScheduler:
    """Runs the jobs of one cluster, which has exactly one scheduler.

    Attributes:
        policy: as read for the last decision.
        nodes: machines at the last check.
        places: queue positions of waiting jobs that can start eventually, by id; 1 is next.
        ready: set when the machines and their jobs are known.
    """

    def __init__(
        self,
        store: ControlStore,
        launcher: Launcher,
        folder: Path,
        policy: PlacementPolicy,
        *,
        rules: Rules | None = None,
        stop_seconds: float = 120.0,
        absent_seconds: float = 120.0,
    ) -> None:
        """Create a scheduler; `run` starts it. `folder`: parent of all jobs' folders; all machines must see it.
        `policy`: its quotas and draining are replaced by stored values.
        """
        self._store, self._folder = store, folder
        self._launcher = launcher
        self.policy, self._rules = policy, rules or Rules()
        self._stop_seconds = stop_seconds
        self._deadlines = Deadlines(store.clock, absent_seconds)
        self.nodes: list[Node] = []
        self.running: dict[str, RunningJob] = {}
        self.waiting: Mapping[str, str] = {}
        self.places: Mapping[str, int] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}  # one for each live job, from its start to its end
        self._starting: dict[str, asyncio.Task[Listening]] = {}  # the part of a life that may be cancelled
        self._cancelled: set[str] = set()  # jobs whose life is to end
        self._stops: dict[str, asyncio.Task[None]] = {}
        self._notes: set[asyncio.Task[None]] = set()  # endings that are being recorded
        self._changed = Notifier()
        self.bases = BaseServers(store, launcher, folder, self._rules, self._changed, self._end)
        self._kinds, self._servers = KnownKinds(), ServersInUse()
        self._budgets = TenantBudgets(store, self.folder_of)
        self._closing = False
        self._failure: Exception | None = None
        self._round_since: float | None = None  # monotonic seconds
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Schedule until cancelled; jobs then continue.

        Other failures of a round are logged, and the next round retries. Raises Superseded if another scheduler has
        taken over the control store.
        """
        try:
            while True:
                seen, submitted = self._changed.count, self._store.changed.count
                seconds = LOOK_SECONDS
                self._round_since = self._store.clock.monotonic()
                try:
                    again_at = await self._round()
                except Superseded:
                    raise
                except Exception as error:
                    self._failure = error
                    trace = None if isinstance(error, PalestraError) else error
                    log.error("a round failed, tried again in %g s: %s", LOOK_SECONDS, error, exc_info=trace)
                    self._round_since = None
                    await asyncio.sleep(LOOK_SECONDS)
                else:
                    self._failure = self._round_since = None
                    self.ready.set()
                    if again_at is not None:
                        seconds = min(max(again_at - self._store.clock.now(), 0.01), LOOK_SECONDS)
                await self._wait(seconds, seen, submitted)
        finally:
            self._closing = True
            tasks = [*self._lives.values(), *self._stops.values()]
            for task in tasks:
                task.cancel()
            if tasks:  # one that waits for a database that does not answer is left to the next scheduler
                await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            await self.bases.close()
            if self._notes:
                await asyncio.wait(self._notes, timeout=NOTE_SECONDS)

    async def _round(self) -> float | None:
        """Check everything once, and return when to check again without changes."""
        await self._store.confirm()
        self.nodes = self.bases.nodes = await self._launcher.nodes()
        await self._adopt()
        if not self.ready.is_set():
            await self._clear_forgotten()
        again_at = await self._place()
        await self._budgets.refresh(await self._store.live(), self.policy.quotas)
        for job_id, reason in self._deadlines.passed().items():
            try:
                await self.cancel(None, job_id, reason)
                self._deadlines.remove(job_id)
            except (StoreUnreachable, Superseded):
                raise
            except PalestraError as error:
                log.error("job %s could not be cancelled, tried again: %s", job_id, error)
        return again_at

    @property
    def problem(self) -> str | None:
        """Describe what this control plane cannot do at the moment, without details; None: everything works."""
        since = self._round_since
        if isinstance(self._failure, StoreError):
            return "the control store can't be used, so no job can be submitted, changed or started"
        if isinstance(self._failure, ServerFailed):
            return "the Ray cluster does not answer, so no job can be started"
        if self._failure is not None:
            return "the scheduler fails, so no job can be started"
        if since is not None and self._store.clock.monotonic() - since > ROUND_SECONDS:
            return f"the scheduler has not answered for {ROUND_SECONDS:g} s, so no job can be started"
        return None

    async def gpu_use(self) -> Mapping[str, GpuReading]:
        """Return figures of the machines' GPUs, by machine."""
        return await self._launcher.gpu_use(self.nodes)

    def folder_of(self, job_id: str) -> Path:
        """Return the folder of a job, with its run and log."""
        return self._folder / job_id

    async def quota_of(self, tenant: str) -> Quota:
        """Return a tenant's quota."""
        return await self._store.read(lambda c: decisions.quota_of(c, tenant)) or Quota()

    async def refusal(self, needs: Resources, tenant: str, adapters: int = 0) -> str | None:
        """Return why a job of a tenant could never start; None: it could. `adapters` are on a shared base."""
        limits, quota = self._rules.bases, await self.quota_of(tenant)
        found = never_starts(needs, self.nodes, tenant, quota, part_of_base(limits, adapters))
        return no_room(needs, limits, self.nodes) if found is None and adapters else found

    def seen(self, job_id: str) -> None:
        """Record a request of a job's client."""
        self._deadlines.seen(job_id)

    async def cancel(self, tenant: str | None, job_id: str, reason: str) -> JobRecord:
        """End a job, after it has saved its training."""
        job = await self._store.request_cancel(tenant, job_id, reason)
        if job.is_over:
            self._deadlines.remove(job_id)
        else:
            if job_id in self._lives:
                self._cancelled.add(job_id)
            self._end(job_id)
        return job

    async def _place(self) -> float | None:
        queued = await self._store.queue()
        # Queue and running jobs are read without an await between them: a job that has just ended must be in one of
        # them, or its room could be given away while it is queued again.
        queue = {job.job_id: job for job in queued if job.job_id not in self._lives}
        in_use = self._servers.waiting(queue.values())
        running = list(self.running.values())
        now = self._store.clock.now()
        for job in queue.values():
            self._deadlines.watch(job)
        # Read after the queue, so that a job submitted under a new quota is not started under the old one.
        self.policy = await self._store.read(lambda c: decisions.with_stored_quotas(c, self.policy))
        await self.bases.refresh(self.policy.quotas)
        in_use |= await self._budgets.obstacles(queue.values(), self.policy.quotas)
        able = [job for job in queue.values() if job.job_id not in in_use]
        own, shared = by_base(able, await self._kinds.of(queue.values()), self._rules.bases, now)
        for job_id, failure in self.bases.take_failures(shared).items():
            del shared[job_id]
            self._live(job_id, self._refuse(queue[job_id], failure))
        cluster = Cluster(nodes=self.nodes, running=running, bases=list(self.bases.running()))
        decision = place_all(own, shared.values(), cluster, self.policy, self._rules.bases, now)
        self.waiting = {**decision.waiting, **decision.impossible, **in_use}
        self.places = {job_id: place for place, job_id in enumerate(decision.waiting, start=1)}
        for ended, reason in decision.ended.items():
            self.bases.end(ended, reason)
        for kind, start in decision.new_bases.items():
            self.bases.start(kind, start)
        for start in decision.starts:
            job, base_id = queue[start.job_id], decision.bases.get(start.job_id)
            if taken := self._servers.waiting([job]):  # by a job of this round, before it
                self.waiting = {**self.waiting, **taken}
                continue
            if base_id is not None:
                self.bases.hold(job, base_id)
            self._hold(job, start, starting=True)
            self._live(job.job_id, self._start(job, start, base_id))
        return decision.again_at

    async def _wait(self, seconds: float, seen: int, submitted: int) -> None:
        await race(self._changed.wait(seconds, seen), self._store.changed.wait(seconds, submitted))

    def _hold(self, job: JobRecord, start: JobStart, *, starting: bool) -> None:
        now = self._store.clock.now()
        self._servers.hold(job)
        self.running[job.job_id] = RunningJob(
            job_id=job.job_id,
            tenant=job.tenant,
            submitted_at=job.created_at,
            needs=job.resources,
            node_id=start.node_id,
            devices=start.devices,
            since=now,
            expected_end=_expected_end(job, now),
            starting=starting,
            beside=part_of_base(self._rules.bases, job.adapters),
            bundles=start.bundles,
        )

    def _live(self, job_id: str, life: object) -> None:
        """Run the coroutine that takes a job from its start, or its adoption, to its end."""
        task = asyncio.ensure_future(life)  # type: ignore[call-overload]
        self._lives[job_id] = task
        task.add_done_callback(lambda done: self._lived(job_id, done))

    def _lived(self, job_id: str, done: asyncio.Task[None]) -> None:
        """Forget a job whose coroutine has ended; after a failure the next round adopts the job."""
        self._lives.pop(job_id, None)
        self.running.pop(job_id, None)
        self._servers.release(job_id)
        self.bases.release(job_id)
        self._cancelled.discard(job_id)
        if done.cancelled() or (error := done.exception()) is None:
            self._changed.notify()
        elif isinstance(error, Superseded):
            self._store.changed.notify()
        else:
            trace = None if isinstance(error, PalestraError) else error
            log.error("job %s: %s: %s", job_id, type(error).__name__, error, exc_info=trace)

    async def _refuse(self, job: JobRecord, reason: str) -> None:
        """Fail a queued job whose base server cannot be started."""
        try:
            await self._store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "its base server is needed")
        except Conflict:  # the job was cancelled meanwhile
            return
        await self._over(job.job_id, Ended(ending=Ending.FAILED, reason=reason))

    async def _start(self, job: JobRecord, start: JobStart, base_id: str | None) -> None:
        folder = self.folder_of(job.job_id)
        try:
            job = await self._store.change_state(
                job.job_id,
                JobState.QUEUED,
                JobState.STARTING,
                _starting_on(start),
                node=start.node_id,
                bundle_nodes=tuple(place.node_id for place in start.bundles),
                run_dir=str(folder / RUN),
                base_id=base_id,
            )
        except Conflict:  # the job was cancelled meanwhile
            return
        server = await self._started(job, (start.node_id, *(place.node_id for place in start.bundles)))
        if isinstance(server, Ended):
            await self._over(job.job_id, server)
        else:
            await self._watch(job.job_id, server)

    async def _started(self, job: JobRecord, node_ids: Sequence[str]) -> Listening | Ended:
        starting = asyncio.ensure_future(self._launch(job, node_ids))
        self._starting[job.job_id] = starting
        try:
            if job.job_id in self._cancelled:  # cancelled before this task existed
                self._end(job.job_id)
            return await starting
        except asyncio.CancelledError:
            if self._closing:
                raise
            return Ended(ending=Ending.STOPPED)
        except Superseded:
            raise
        except ConfigError as error:  # starting the job again would not help
            return Ended(ending=Ending.FAILED, reason=str(error))
        except NodeLost as error:  # no fault of the job
            return Ended(ending=Ending.STOPPED, reason=str(error))
        except PalestraError as error:
            return Ended(ending=ending_of(error), reason=str(error))
        except Exception as error:
            log.exception("job %s could not be started", job.job_id)
            return Ended(ending=Ending.LOST, reason=f"{type(error).__name__}: {error}")
        finally:
            del self._starting[job.job_id]

    async def _launch(self, job: JobRecord, node_ids: Sequence[str]) -> Listening:
        await self._store.confirmed()
        at = None if job.base_id is None else await self.bases.admit(job.job_id, job.base_id, self.policy.quotas)
        live = sum(running.tenant == job.tenant for running in self.running.values())
        await self._budgets.begin(job, await self.quota_of(job.tenant), live)
        nodes = {node.node_id: node for node in self.nodes}
        order = await order_of(job, self.folder_of(job.job_id), self.folder_of, self._rules, node_ids, nodes, at)
        await self._store.confirmed()
        return await self._launcher.start(order)

    async def _watch(self, job_id: str, server: Listening) -> None:
        job = await self._store.job(None, job_id)
        if job.state is JobState.STARTING:
            job = await self._store.change_state(
                job_id, JobState.STARTING, JobState.RUNNING, "it listens", url=server.url
            )
        self._deadlines.watch(job)
        expected_end = _expected_end(job, self._store.clock.now())
        running = replace(self.running[job_id], starting=False, expected_end=expected_end)
        node = next((node for node in self.nodes if node.node_id == running.node_id), None)
        given = server.devices if running.needs.gpus else ()
        # Indices beyond the node's devices would mean that the cluster numbers devices differently.
        if given and node is not None and max(given) < node.gpus:
            share = counted(running.needs).gpus // len(given)
            running = replace(running, devices=tuple(GpuShare(device, share) for device in given))
        self.running[job_id] = running
        self._changed.notify()
        await self._over(
            job_id, await self._launcher.ended(job_id, lambda left: self._heard(job_id, expected_end, left))
        )

    def _heard(self, job_id: str, latest: float | None, seconds_left: float | None) -> None:
        """Update the expected end of a running job from its learner's estimate, but not beyond `latest`."""
        running = self.running.get(job_id)
        if running is not None and seconds_left is not None and 0 <= seconds_left < math.inf:
            estimate = self._store.clock.now() + seconds_left
            expected_end = estimate if latest is None else min(latest, estimate)
            self.running[job_id] = replace(running, expected_end=expected_end)

    async def _over(self, job_id: str, ended: Ended) -> None:
        """Record how a model server ended, even if this scheduler is stopped meanwhile."""
        note = asyncio.ensure_future(self._note(job_id, ended))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)
        await asyncio.shield(note)

    async def _note(self, job_id: str, ended: Ended) -> None:
        """Write a server's ending and the job's next state to the store, and retry while the store does not answer."""
        folder = self.folder_of(job_id)
        if ended.ending is Ending.LOST:  # the server may have written how it ended before its process died
            written = await asyncio.to_thread(read_ended, folder)
            ended = ended if written is None else written
        tail = await asyncio.to_thread(log_tail, folder / LOG_FILE)
        while True:
            try:
                job = await self._store.job(None, job_id)
                if job.state not in LIVE_STATES:  # an attempt was done although the store did not say so
                    following = job.state
                    break
                await self._budgets.settle(job)
                following, reason, left = following_state(job, ended, self._store.clock.now())
                await self._store.change_state(job_id, job.state, following, reason, restarts_left=left, log_tail=tail)
                break
            except IllegalTransition:
                raise
            except Conflict:  # the cancellation was requested meanwhile, which changes the ending
                continue
            except StoreUnreachable as error:  # must not be lost: a server that is gone can't be asked again
                log.error("the end of job %s could not be written down, tried again: %s", job_id, error)
                await asyncio.sleep(LOOK_SECONDS)
        if following is JobState.QUEUED:
            self._deadlines.stop_limit(job_id)
        else:
            self._deadlines.remove(job_id)

    def _end(self, job_id: str) -> None:
        """Stop a live job's server, or cancel its start; idempotent."""
        starting = self._starting.get(job_id)
        if starting is not None and not starting.done():
            if not starting.cancelling():  # a second cancellation would interrupt the clean-up
                starting.cancel()
        elif job_id not in self._stops:
            self._stops[job_id] = asyncio.ensure_future(self._stop(job_id, self._stop_seconds))
            self._stops[job_id].add_done_callback(lambda done: self._stopped(job_id, done))

    async def _stop(self, job_id: str, grace_seconds: float) -> None:
        await self._store.confirmed()
        await self._launcher.stop(job_id, grace_seconds)

    def _stopped(self, job_id: str, done: asyncio.Task[None]) -> None:
        """Forget a stop that is done, and log why it failed if it did."""
        del self._stops[job_id]
        if not done.cancelled() and (error := done.exception()) is not None and not isinstance(error, Superseded):
            log.error("job %s could not be stopped: %s: %s", job_id, type(error).__name__, error, exc_info=error)

    async def _adopt(self) -> None:
        """Watch unwatched live jobs: an earlier scheduler's, and those whose watch failed."""
        live = await self._store.live()
        await self.bases.adopt(live, self._devices)
        for job in live:
            if job.job_id in self._lives:
                continue
            await self.bases.readmit(job)
            self._deadlines.watch(job)
            start = self._start_of(job)
            self._hold(job, start, starting=job.state is JobState.STARTING)
            self._live(job.job_id, self._find(job.job_id))

    async def _find(self, job_id: str) -> None:
        """Watch a live job's server again; if it is gone, record how it ended."""
        job = await self._store.job(None, job_id)
        if job.state not in LIVE_STATES:  # the job ended since it was listed
            return
        await self._store.confirmed()  # `find` cleans up after a server that is gone
        server = await self._launcher.find(job_id)
        if server is not None:
            if job.cancel_requested:
                self._end(job_id)
            await self._watch(job_id, server)
        elif job.state is JobState.STARTING:  # no fault of the job
            await self._over(job_id, Ended(ending=Ending.STOPPED, reason="its start was broken off"))
        else:
            ended = await asyncio.to_thread(read_ended, self.folder_of(job_id))
            await self._over(job_id, ended or Ended(ending=Ending.LOST, reason="its model server is gone"))

    async def _clear_forgotten(self) -> None:
        """End servers of jobs that are not live, left by a dead scheduler."""
        for job_id in await self._launcher.known():
            try:
                job = await self._store.job(None, job_id)
            except NotFound:  # a job of another control plane on the same cluster
                continue
            if job.state not in LIVE_STATES:
                log.warning("job %s is %s, and something of its server was left; it is ended", job_id, job.state)
                await self._stop(job_id, 0.0)

    def _start_of(self, job: JobRecord) -> JobStart:
        """Return where the processes of a job are that an earlier scheduler started."""
        found: list[PlacedBundle] = []
        for part, node_id in zip(job.resources.parts, (job.node or "", *job.bundle_nodes), strict=True):
            found.append(PlacedBundle(node_id, self._devices(node_id, part, found)))
        own, *others = found
        return JobStart(job_id=job.job_id, node_id=own.node_id, devices=own.devices, bundles=tuple(others))

    def _devices(self, node_id: str, needs: ProcessResources, own: Sequence[PlacedBundle] = ()) -> tuple[GpuShare, ...]:
        """Return devices for an earlier scheduler's job: as many as it uses, but an unknown choice."""
        node = next((node for node in self.nodes if node.node_id == node_id), None)
        return () if node is None else devices_left(node, needs, (*self.running.values(), *self.bases.held()), own)


def _starting_on(start: JobStart) -> str:
    others = sorted({short(place.node_id) for place in start.bundles if place.node_id != start.node_id})
    own = f"starting on node {short(start.node_id)}"
    return f"{own}, with processes on {', '.join(others)}" if others else own


def _expected_end(job: JobRecord, now: float) -> float | None:
    """Return when a job that runs or starts at `now` will have ended (Unix seconds), for `RunningJob.expected_end`."""
    seconds = job.expected_seconds(now)
    return None if seconds is None else now + seconds
