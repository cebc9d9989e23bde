"""`InferenceManager`: a pool of inference workers that is one engine to the rest of the job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence

import numpy as np

from palestra.engine.base import EngineLoad, EngineRequest, TokenReplay
from palestra.engine.pool.keeper import WorkerKeeper
from palestra.engine.pool.options import CallCounts, CheckCapacity, NumberChange, PoolOptions, StartWorker
from palestra.engine.pool.placement import block_hashes, place_request
from palestra.engine.pool.state import KeptWeights, PoolState, WantedPolicy
from palestra.engine.pool.worker import InferenceWorker, added_loads
from palestra.errors import Conflict, EngineFailure, InvalidRequest, ModelError, PalestraError, ReplyLost
from palestra.models.weights import WeightSource
from palestra.terminal import problem
from palestra.types.calls import FIRST_VERSION, PolicyVersion, SampledTokens, TokenSequence
from palestra.waiting import cancelled, race, together

log = logging.getLogger("palestra.engine")
MOST_ATTEMPTS = 3  # workers that one request may lose: a request that kills its worker must not kill them all


class InferenceManager:
    """An `Engine` of several workers that replaces dead and stuck ones.

    Another worker resamples a lost worker's reply with the same seed. The lost attempt is only used if the caller
    already has tokens of it; see `TokenReplay`.
    """

    def __init__(
        self,
        start: StartWorker,
        policies: Collection[str],
        keep: Callable[[str, WeightSource], Awaitable[KeptWeights]],
        options: PoolOptions,
        check_capacity: CheckCapacity | None = None,
    ) -> None:
        """Create a pool; `open` starts its workers. Every worker has `policies` from its start; `keep` keeps a policy's
        weights for workers that need them later; `check_capacity` is called before workers are added to a running pool.
        """
        self._first, self._keep, self._options = frozenset(policies), keep, options
        self._check_capacity = check_capacity
        self._state = PoolState()
        self._keeper = WorkerKeeper(self._state, start, options.start_seconds)
        self._change: NumberChange | None = None  # of the number of workers: the newest
        self._workers: list[InferenceWorker] = []
        self._gone = EngineLoad(waiting=0, running=0)  # what workers that were taken away have done
        self._tasks: dict[InferenceWorker, asyncio.Task[None]] = {}
        self._rolling = asyncio.Lock()
        self._numbers = 0
        self._calls = CallCounts()

    async def open(self) -> None:
        """Start the workers, and return when all of them serve."""
        try:
            self._check_number(self._options.replicas)
            added = [self._added_worker(later=False) for _ in range(self._options.replicas)]
            await race(
                self._state.until(lambda: all(worker.is_ready for worker in added)), asyncio.shield(self._state.failure)
            )
            self._state.check_open()
        except BaseException:
            await self.close()
            raise

    # Requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SampledTokens, None]:
        """Stream a reply from one of the workers; see `Engine.generate`."""
        self._check_known(request.policy)
        replay, hashes = TokenReplay(), block_hashes(request.prompt)
        refusals: dict[str, InvalidRequest] = {}
        losses = 0
        with self._calls.counted(replay):
            while losses < MOST_ATTEMPTS:
                worker = await self._placed(request, hashes, refusals)
                engine, begun = worker.engine, False
                assert engine is not None
                try:
                    with worker.serving():
                        worker.prefixes.add(request.policy, hashes)
                        stream = engine.generate(request)
                        async with contextlib.aclosing(stream) as pieces:  # type: ignore[type-var]
                            async for piece in pieces:
                                begun = True
                                if (fresh := replay.take(piece)) is not None:
                                    yield fresh
                    replay.end()
                    worker.prefixes.add(request.policy, block_hashes(_whole(request.prompt, replay.tokens), hashes))
                    return
                except InvalidRequest as error:
                    if begun:  # a worker refuses a request before the first token, or has a defect
                        raise
                    refusals[worker.kind] = error
                    continue
                except ReplyLost:
                    raise
                except EngineFailure:
                    if self._state.closed or not await worker.has_failed(engine):
                        raise
                losses += 1
                replay.begin_again()
        raise EngineFailure(f"{MOST_ATTEMPTS} inference workers died while they sampled this reply; see their output")

    async def _placed(
        self, request: EngineRequest, hashes: list[int], refusals: Mapping[str, InvalidRequest]
    ) -> InferenceWorker:
        """Wait for and return a suitable worker for a request: one that serves, of a kind that has not refused it."""
        serving = await self._serving(refusals)
        found = [worker.candidate(request.policy, hashes) for worker in serving]
        return serving[place_request(len(request.prompt.ids), found)]

    async def _serving(self, refusals: Mapping[str, InvalidRequest]) -> list[InferenceWorker]:
        """Return workers that accept a request, at least one; wait for starting workers."""
        while True:
            self._state.check_open()
            able = [worker for worker in self._workers if worker.kind not in refusals]
            if refusals and not able:
                raise next(iter(refusals.values()))
            if serving := [worker for worker in able if worker.serves]:
                return serving
            async with self._state.changed:
                await self._state.changed.wait()

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Return the log-probability of each prompt token but the first; see `Engine.score`."""
        self._check_known(policy)
        refusals: dict[str, InvalidRequest] = {}
        losses = 0
        while losses < MOST_ATTEMPTS:
            worker = min(await self._serving(refusals), key=lambda one: one.calls)
            engine = worker.engine
            assert engine is not None
            try:
                with worker.answering():
                    return await engine.score(policy, prompt)
            except InvalidRequest as error:
                refusals[worker.kind] = error
            except EngineFailure:
                if self._state.closed or not await worker.has_failed(engine):
                    raise
                losses += 1
        raise EngineFailure(f"{MOST_ATTEMPTS} inference workers died while they scored this prompt")

    async def scores(self, policy: str, prompt: TokenSequence) -> list[list[float]]:
        """Return the log-probabilities of a prompt from each worker; see `score`.

        Workers that do not serve, and kinds without scores, are left out.
        """
        self._check_known(policy)
        found = []
        for worker in await self._serving({}):
            if (engine := worker.engine) is None:  # lost while another one answered
                continue
            try:
                with worker.answering():
                    found.append(await engine.score(policy, prompt))
            except InvalidRequest:
                continue
            except EngineFailure:
                if self._state.closed or not await worker.has_failed(engine):
                    raise
        return found

    # Weights

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Give every worker new weights, one after another or all together; see `Engine.sync_weights`.

        If one after another, replies meanwhile begin on older and on newer weights; each token says which. After this
        returns, all serving workers have the new ones.
        """
        self._check_known(policy)
        like = self._state.wanted[policy].like if policy in self._state.wanted else None
        kept = await self._keep(policy, source)
        await self._want(WantedPolicy(name=policy, like=like, version=version, weights=kept))

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Add a policy to every worker; see `Engine.add_policy`."""
        self._check_known(like)
        known = self._state.wanted.get(like)
        root = like if known is None or known.like is None else known.like
        kept = await self._keep(name, source) if source is not None else None if known is None else known.weights
        await self._want(WantedPolicy(name=name, like=root, version=version, weights=kept))

    async def remove_policy(self, name: str) -> None:
        """Remove an added policy from every worker; see `Engine.remove_policy`."""
        policy = self._state.wanted.get(name)
        if policy is not None and policy.like is not None:
            del self._state.wanted[name]
            await self._hand_out()

    async def _want(self, policy: WantedPolicy) -> None:
        """Have every worker take a policy."""
        self._state.check_open()
        before = self._state.wanted.get(policy.name)
        self._state.wanted[policy.name] = policy
        try:
            await self._hand_out()
        except ModelError:
            if self._state.wanted.get(policy.name) is policy:
                if before is None:
                    del self._state.wanted[policy.name]
                else:
                    self._state.wanted[policy.name] = before
            raise
        self._state.check_open()

    async def _hand_out(self) -> None:
        """Bring all workers up to date; a starting worker updates before it serves."""
        rolling = self._options.sync == "rolling"
        async with self._rolling if rolling else contextlib.nullcontext():
            workers = [worker for worker in self._workers if worker.is_ready]
            accepted = False
            for turn in [[worker] for worker in workers] if rolling else [workers]:
                refusals = await together(*(self._bring(worker) for worker in turn))
                if not accepted and refusals and all(refusals):
                    raise refusals[0] or ModelError("the weights do not fit")
                accepted = True
                for worker, refusal in zip(turn, refusals, strict=True):
                    if refusal is None:
                        continue
                    if worker.kind and worker.refused is not None and worker.refused.like is not None:
                        # This kind has no room for one more policy. Those that have it drop it at the next update.
                        raise refusal
                    worker.lose(f"refused weights that another one has taken: {refusal}")

    async def _bring(self, worker: InferenceWorker) -> ModelError | None:
        """Bring one worker up to date; return its refusal; give it up if it fails, for its replacement."""
        try:
            await worker.take(self._state.wanted)
        except ModelError as error:
            return error
        except EngineFailure as error:
            worker.lose(f"failed in an update: {error}")
        return None

    # The whole

    async def pause(self) -> None:
        """Pause all workers; see `Engine.pause`."""
        self._state.paused = True
        await self._tell_paused()

    async def resume(self) -> None:
        """Resume all workers; see `Engine.resume`."""
        self._state.paused = False
        await self._tell_paused()

    async def _tell_paused(self) -> None:
        await together(*(self._keeper.pause(worker) for worker in self._workers if worker.is_ready))

    def version(self, policy: str) -> PolicyVersion:
        """Return the oldest version among serving workers; see `Engine.version`.

        A claim reports it as the version that its episode may be sampled from, so the oldest is the safe one. After
        `sync_weights` it is the newest.
        """
        self._check_known(policy)
        served = [worker.version(policy) for worker in self._workers if worker.serves]
        known = self._state.wanted.get(policy)
        return min(served, default=FIRST_VERSION if known is None else known.version)

    def load(self) -> EngineLoad:
        """Return the pool's requests, and the sums of its workers' counters."""
        loads = [self._gone, *(worker.own_load for worker in self._workers)]
        return EngineLoad(
            waiting=self._calls.waiting,
            running=self._calls.running,
            kv_bytes_used=sum(load.kv_bytes_used for load in loads),
            kv_bytes=sum(load.kv_bytes for load in loads),
            passes=sum(load.passes for load in loads),
            prefilled_tokens=sum(load.prefilled_tokens for load in loads),
            sampled_tokens=self._calls.sampled_tokens,
            moved_bytes=sum(load.moved_bytes for load in loads),
            workers=tuple(worker.view() for worker in self._workers),
        )

    async def failure(self) -> str:
        """Wait until a worker cannot be kept running, and return which and why."""
        return str(await asyncio.shield(self._state.failure))

    async def next_loss(self) -> str:
        """Wait for the next lost or failed worker that does not end the pool, and describe it."""
        return await self._state.news.get()

    async def close(self) -> None:
        """End all workers; requests in flight fail with EngineFailure."""
        self._state.closed = True
        await self._state.notify()
        change = self._change
        if change is not None:
            change.end(EngineFailure("the engine was stopped"))
        try:
            await cancelled(*self._tasks.values(), *([change.work] if change is not None and change.work else []))
        finally:
            self._state.wanted.clear()  # frees the weights

    async def resize(self, replicas: int) -> None:
        """Change the number of workers while requests are answered, and return when it is reached.

        Removed workers finish their requests first. Added workers start one after another. Cancelling the caller does
        not stop the change. Raises Conflict: the pool has several kinds of workers, or another call requested another
        number.
        """
        if self._options.kinds:  # it would not be said which kind becomes more, or fewer
            raise Conflict(
                "this job has inference workers of several kinds, whose number stays as it is; change engine.workers, "
                "and start the job again"
            )
        self._check_number(replicas)
        self._state.check_open()
        change = self._change
        if change is None or change.ended.done() or change.replicas != replicas:
            await self._check_capacity_for(replicas)
            self._state.check_open()
            change = self._changed_to(replicas)
        await race(asyncio.shield(change.ended), asyncio.shield(self._state.failure))
        self._state.check_open()
        if (error := change.ended.result()) is not None:
            raise error

    def _check_number(self, replicas: int) -> None:
        if replicas < 1:
            raise InvalidRequest("a pool has at least one worker", "replicas")
        if self._options.most is not None and replicas > self._options.most:
            raise InvalidRequest(
                f"replicas is {replicas}, and this job has room for {self._options.most} workers", "replicas"
            )

    async def _check_capacity_for(self, replicas: int) -> None:
        """Raise an error if the machine has no memory for more workers, before one is started."""
        stay = self._staying()
        if replicas > len(stay) and self._check_capacity is not None:
            # Also those that start now or again are still to take their memory.
            await self._check_capacity(replicas - sum(worker.is_ready for worker in stay))

    def _staying(self) -> list[InferenceWorker]:
        return [worker for worker in self._workers if not worker.is_draining]

    def _changed_to(self, replicas: int) -> NumberChange:
        """Begin a change of the number of workers; those that leave get no further requests from now on."""
        before = self._change
        if before is not None and not before.ended.done():
            if before.replicas == replicas:
                return before
            before.overtake(replicas)
        stay = self._staying()
        # First those that do not serve: the start of one that is not wanted any more is broken off.
        for worker in sorted(stay, key=lambda one: (one.is_ready, -one.requests))[: max(len(stay) - replicas, 0)]:
            worker.drain()
        self._change = NumberChange(replicas, asyncio.get_running_loop().create_future())
        self._change.work = asyncio.create_task(self._carry_out(self._change))
        return self._change

    async def _carry_out(self, change: NumberChange) -> None:
        """Wait for leaving workers, and add missing ones in turn: loading takes memory, and the others sample on."""
        leaving = [self._tasks[worker] for worker in self._workers if worker.is_draining]
        if leaving:
            await asyncio.wait(leaving)
        starting = [worker for worker in self._staying() if not worker.has_served]  # of a change that was overtaken
        while (problem := await self._problem_of(starting)) is None and len(self._staying()) < change.replicas:
            starting = [self._added_worker(later=True)]
        change.end(problem)

    async def _problem_of(self, starting: Sequence[InferenceWorker]) -> PalestraError | None:
        """Wait until workers serve or are given up; return the reason for one that is, or None."""
        await self._state.until(lambda: all(worker.has_served or worker not in self._workers for worker in starting))
        return next((worker.problem for worker in starting if worker.problem is not None), None)

    def _added_worker(self, *, later: bool) -> InferenceWorker:
        """Begin to start one more worker."""
        options = self._options
        kind = options.kinds[self._numbers] if options.kinds else ""
        worker = InferenceWorker(self._numbers, options.prefix_tokens, options.stuck_seconds, kind, later=later)
        self._numbers += 1
        self._workers.append(worker)
        self._tasks[worker] = asyncio.create_task(self._keep_running(worker))
        return worker

    async def _keep_running(self, worker: InferenceWorker) -> None:
        """Run a worker and its replacements until it is removed or cannot be kept running."""
        try:
            await race(self._keeper.run(worker), worker.left())
        except PalestraError as error:
            self._give_up(worker, error)
        except Exception as error:
            log.exception("%s has failed in a way that is a defect", worker.name)
            self._give_up(worker, EngineFailure(f"{worker.name} has failed: {problem(error)}"))
        finally:
            self._gone = added_loads(worker.own_load, self._gone)
            self._workers.remove(worker)
            del self._tasks[worker]
            await self._state.notify()

    def _give_up(self, worker: InferenceWorker, error: PalestraError) -> None:
        """Fail the pool because of a worker that cannot be kept running, unless the pool has served without it."""
        if not worker.later or worker.has_served:
            self._state.fail(error)
            return
        worker.problem = error
        self._state.tell(f"{error}; it is taken away, and the others go on")

    def _check_known(self, policy: str) -> None:
        if policy not in self._first and policy not in self._state.wanted:
            known = ", ".join(map(repr, (*sorted(self._first), *sorted(self._state.wanted.keys() - self._first))))
            raise ModelError(f"this engine has the policies {known}, not {policy!r}")


def _whole(prompt: TokenSequence, reply: Sequence[int]) -> TokenSequence:
    return TokenSequence(np.concatenate([prompt.ids, np.array(reply, np.int32)]), prompt.media)
