"""One model: executes its requests in the order of their numbers, and can be restored at any time.

Its state is its last checkpoint plus the later requests, executed again. Checkpoints are written between an optimizer
step and the next gradient, so that all requests of a gradient are still in the journal. A model that only accumulates
gradients is not checkpointed: it is restored by accumulating them again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil

from palestra.errors import CheckpointError, NotFound, PalestraError, StoreError
from palestra.threads import in_thread
from palestra.trainer.checkpoint import keep_newest
from palestra_bases.tinker.records import FutureRequest, ModelRecord
from palestra_bases.tinker.training import TinkerContext, Training

log = logging.getLogger("palestra.tinker")
KEPT = 2  # checkpoints from which a model is restored: the newest, and one for when that is damaged
INTERNAL = "an internal error; see the server's log"


class Model:
    """Executes the requests to one model.

    Attributes:
        record: as of this object's creation.
    """

    def __init__(self, record: ModelRecord, context: TinkerContext) -> None:
        """Prepare to execute; `run` does."""
        self.record = record
        self._context, self._journal, self._sessions = context, context.journal, context.sessions
        self._trainer, self._settled = context.trainer_of(record.tenant), context.settled
        self._training: Training | None = None  # None: the model is not in memory
        self._executed, self._dropped = record.executed, record.dropped
        self._saved_at: list[int] = []  # numbers of the requests after which the checkpoints that are kept were written
        self._since_save = 0  # optimizer steps
        self._wake, self._lock = asyncio.Event(), asyncio.Lock()
        self._running: asyncio.Task[bool] | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a request is being executed."""
        return self._running is not None and not self._running.done()

    def notify(self) -> None:
        """Check for new requests."""
        self._wake.set()

    async def run(self) -> None:
        """Execute requests until cancelled, or until the model could not be created."""
        while True:
            self._wake.clear()
            request = await self._journal.next_request(self.record.model_id)
            if request is None:
                await self._wake.wait()
                continue
            # What has begun is finished also where this task is cancelled: `unload` waits for it.
            self._running = asyncio.create_task(self._execute_alone(request))
            if not await asyncio.shield(self._running):
                return

    async def unload(self) -> None:
        """Free the model's memory, after writing a checkpoint if possible."""
        if self._running is not None and not self._running.done():
            await asyncio.wait((self._running,))
        async with self._lock:
            if self._training is None:
                return
            if self._since_save and not self._training.gradients:
                await self._try_to_save()
            await self._forget()

    async def _execute_alone(self, request: FutureRequest) -> bool:
        async with self._lock:
            return await self._execute(request)

    async def _execute(self, request: FutureRequest) -> bool:
        """Execute a request and record its result. False: the model could not be created, and was removed."""
        first = request.seq_id == 0
        try:
            training = await self._loaded(first)
            outcome = await training.apply(request)
            if outcome.save:
                await self._save(request.seq_id, alone=True)
        except StoreError:
            raise
        except PalestraError as error:
            await self._failed(request, str(error), user=error.http_status < 500)
            return not first
        except Exception:
            log.exception("%s of %s failed", request.kind, self.record.model_id)
            await self._failed(request, INTERNAL, user=False)
            return not first
        keep = outcome.changes and not outcome.save
        await self._journal.finish(request, outcome.result, keep, outcome.record)
        self._executed = request.seq_id
        self._settled(request.request_id)
        if outcome.removed is not None:
            await in_thread(lambda: shutil.rmtree(outcome.removed or "", ignore_errors=True))
        if request.kind == "optim_step":
            self._since_save += 1
        # After a restart there may be a gradient already when enough steps have been done again.
        if self._since_save >= self._context.limits.checkpoint_steps and not training.gradients:
            await self._try_to_save()
        return True

    async def _failed(self, request: FutureRequest, message: str, user: bool) -> None:
        first = request.seq_id == 0
        remove = self._sessions.delete_model(self.record.model_id) if first else None
        await self._journal.fail(request, message, "user" if user else "server", remove)
        self._executed = request.seq_id
        if first or not user or request.kind == "load_weights":
            await self._forget()
        self._settled(request.request_id)

    async def _loaded(self, first: bool) -> Training:
        if self._training is None:
            self._training = Training(self.record, self._context)
            self._since_save, self._saved_at = 0, []
            if not first:
                try:
                    await self._restore(self._training)
                except BaseException as error:
                    await self._forget()
                    if isinstance(error, PalestraError) and error.http_status < 500:  # it is not this request's fault
                        raise CheckpointError(f"{self.record.model_id} could not be restored: {error}") from error
                    raise
        return self._training

    async def _restore(self, training: Training) -> None:
        """Load the newest checkpoint, and repeat later requests."""
        model_id, after = self.record.model_id, -1
        # What was executed since this object's record was read, by another object of before, counts as well.
        known = await self._sessions.model(self.record.tenant, model_id)
        self._executed, self._dropped = known.executed, known.dropped
        await training.create()
        state = await self._trainer.load(model_id, training.run.checkpoints)
        if state is not None:
            after, training.steps = int(state["seq"]), int(state["step"])
            self._saved_at = [after]
        if after < self._dropped:
            raise CheckpointError(
                f"the newest checkpoint of {model_id} is damaged, and what was done after the one before is not in the "
                "journal any more; train on from a saved checkpoint"
            )
        await training.run.restore(training.steps)
        for _, request_id in await self._journal.history(model_id, after, self._executed):
            done = await self._journal.with_body(request_id)
            await training.apply(done, again=True)
            self._since_save += done.kind == "optim_step"

    async def _try_to_save(self) -> None:
        """Write a checkpoint; where that is not possible, because the disk is full, say, the journal has everything."""
        try:
            await self._save(self._executed)
        except CheckpointError as error:
            log.error("no checkpoint of %s: %s", self.record.model_id, error)

    async def _save(self, seq_id: int, alone: bool = False) -> None:
        training = self._training
        assert training is not None
        assert not training.gradients, "a checkpoint has no gradient"
        state = {"step": training.steps, "seq": seq_id}
        request_id = f"checkpoint {seq_id}"
        folder = training.run.checkpoints
        await self._trainer.save(self.record.model_id, folder, state, request_id)
        await in_thread(lambda: keep_newest(folder, KEPT))
        self._since_save = 0
        self._saved_at = [*([] if alone else self._saved_at[-1:]), seq_id]
        if alone or len(self._saved_at) > 1:
            self._dropped = self._saved_at[0]
            await self._journal.drop_bodies(self.record.model_id, self._dropped)

    async def _forget(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.run.close()
            try:
                await self._trainer.remove(self.record.model_id)
            except NotFound:  # it could not be created
                return
