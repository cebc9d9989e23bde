"""The effect of each request to a model: in the trainer, and in the folders of saved weights."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from palestra.errors import InvalidAlgorithm, InvalidRequest, NotFound
from palestra.http.bodies import parse_body
from palestra.threads import in_thread
from palestra.trainer.base import OptimParams, PolicySpec, Trainer
from palestra.trainer.checkpoint import step_of
from palestra_bases.tinker import protobuf
from palestra_bases.tinker.bases import Base, Bases
from palestra_bases.tinker.datums import DatumBatch, loss_without_gradient, output_of, read_batch
from palestra_bases.tinker.journal import Journal, Operation
from palestra_bases.tinker.records import (
    EXTERNAL,
    SAMPLER,
    SCHEME,
    TRAINING,
    Checkpoint,
    FutureRequest,
    ModelRecord,
    Sampler,
    TinkerLimits,
)
from palestra_bases.tinker.run_record import RunRecord
from palestra_bases.tinker.saved import Saved
from palestra_bases.tinker.sessions import TinkerSessions
from palestra_bases.tinker.wire import AdamParams, LoadWeights, OptimStep, SaveWeights

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
SHORTEST_TTL, LONGEST_TTL = 3600, 10 * 366 * 24 * 3600  # seconds that a checkpoint may be kept, if not for ever


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutcome:
    """The outcome of a request.

    Attributes:
        changes: whether the model has changed, so that restoring it must repeat the request.
        record: executed together with recording the result.
        save: whether to write the model to disk now, because the request's source may disappear.
        removed: a folder to remove once the result is recorded.
    """

    result: bytes
    changes: bool = False
    record: Operation | None = None
    save: bool = False
    removed: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerContext:
    """What the parts of one server share.

    Attributes:
        trainer_of: returns the trainer with a tenant's loaded models, by their ids.
        settled: called with the id of a request that has a result.
        spawn: runs work of a name until the server stops; its failure ends the server.
    """

    trainer_of: Callable[[str], Trainer]
    bases: Bases
    journal: Journal
    sessions: TinkerSessions
    saved: Saved
    limits: TinkerLimits
    folder: Path
    settled: Callable[[str], None]
    spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]

    def run_folder(self, model_id: str) -> Path:
        """Return the run folder of a model."""
        return self.folder / "models" / model_id.replace(":", "-")


class Training:
    """The state of one model in memory, and the effects of requests on it.

    Attributes:
        gradients: requests whose gradients the next step applies.
    """

    def __init__(self, record: ModelRecord, context: TinkerContext) -> None:
        self._record, self._context = record, context
        self._base: Base = context.bases.of(record.base)
        self._trainer = context.trainer_of(record.tenant)
        self.steps, self.gradients = 0, 0
        self.run = RunRecord(context.run_folder(record.model_id), record.model_id, record.base, record.adapter)

    async def create(self, weights: Path | None = None) -> None:
        """Create the model in the trainer. `weights`: an adapter to begin with; None: new ones, from its seed."""
        model = self._base.name if weights is None else str(weights)
        spec = PolicySpec(model=model, adapter=self._record.adapter, seed=self._record.seed)
        await self._trainer.create(self._record.model_id, spec)
        self.steps, self.gradients = 0, 0

    async def apply(self, request: FutureRequest, again: bool = False) -> RequestOutcome:
        """Execute a request. `again`: whether it is repeated to restore the model."""
        assert request.body is not None
        work = {
            "create_model": self._create,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_for_sampler": self._save_for_sampler,
            "save_external": self._save_external,
            "load_weights": self._load,
        }[request.kind]
        return await work(request, request.body, again)

    async def _create(self, request: FutureRequest, body: bytes, again: bool) -> RequestOutcome:
        await self.create()
        return RequestOutcome(result=self._answer("create_model", model_id=self._record.model_id))

    async def _forward_backward(self, request: FutureRequest, body: bytes, again: bool) -> RequestOutcome:
        started = time.monotonic()
        batch, forward_only = await in_thread(partial(self._read, body))
        name, trainer = self._record.model_id, self._trainer
        if forward_only:
            found = await trainer.forward(name, batch.rows, ["old_logprobs"])
            logprobs = found["old_logprobs"]
            loss = await in_thread(partial(loss_without_gradient, batch, logprobs))
            return RequestOutcome(result=output_of(batch, logprobs, loss))
        if self.gradients >= self._context.limits.gradients:  # all of which have to be kept, to be done again
            raise InvalidRequest(f"{self.gradients} requests have added gradients, which is the most; call optim_step")
        try:
            report = await trainer.forward_backward(name, batch.rows, batch.loss, request.request_id, logprobs=True)
        except InvalidAlgorithm as error:  # a number of the user's makes the loss one that is none
            raise InvalidRequest(str(error)) from None
        self.gradients += 1
        loss = report.metrics["loss"]
        self.run.add(loss, report.rows, report.trained_tokens, time.monotonic() - started)
        assert report.logprobs is not None
        return RequestOutcome(result=output_of(batch, report.logprobs, loss), changes=True)

    def _read(self, body: bytes) -> tuple[DatumBatch, bool]:
        """Return the batch of a body, and whether only logprobs are wanted."""
        request = protobuf.parse("ForwardBackwardRequest", body)
        # The last target of a datum has to fit into the context as well.
        batch = read_batch(request, self._base.vocab_size, self._base.max_context - 1, self._context.limits)
        return batch, bool(request.forward_only)

    async def _optim_step(self, request: FutureRequest, body: bytes, again: bool) -> RequestOutcome:
        started, asked = time.monotonic(), parse_body(OptimStep, body)
        if asked.adam_params is None:
            kind = "none" if asked.optimizer_params is None else repr(asked.optimizer_params.type)
            raise InvalidRequest(f"the optimizer here is adamw with adam_params, and not {kind}", "optimizer_params")
        params = optim_params(asked.adam_params)
        if not self.gradients:
            raise InvalidRequest(
                f"optim_step {request.seq_id} has no gradient to apply: no forward_backward has succeeded since the "
                "step before"
            )
        report = await self._trainer.optim_step(self._record.model_id, params, request.request_id)
        self.steps, self.gradients = self.steps + 1, 0
        await self.run.step(self.steps, report, time.monotonic() - started, again)
        metrics = {"grad_norm": report.grad_norm, "learning_rate": report.learning_rate, "step": float(self.steps)}
        if not report.applied:  # the gradient was not finite
            metrics["update_skipped"] = 1.0
        return RequestOutcome(result=orjson.dumps({"metrics": metrics}), changes=True)

    async def _save(self, request: FutureRequest, body: bytes, again: bool) -> RequestOutcome:
        asked = parse_body(SaveWeights, body)
        path = self._path(asked, TRAINING)
        before = await self._replaced(path, asked.overwrite)
        folder = self._context.folder / TRAINING / request.request_id
        state = {"step": self.steps, "seq": request.seq_id}
        written = await self._trainer.save(self._record.model_id, folder, state, request.request_id)
        return await self._saved(path, written, asked, "save_weights", before)

    async def _save_for_sampler(self, request: FutureRequest, body: bytes, again: bool) -> RequestOutcome:
        asked = parse_body(SaveWeights, body)
        if asked.path is not None:
            return await self._save_weights(request, asked, SAMPLER, "save_weights_for_sampler")
        await self._check_number(asked.sampling_session_seq_id)
        folder = self._context.folder / SAMPLER / request.request_id
        await self._trainer.save_weights(self._record.model_id, folder, self.steps, request.request_id)
        sampler = Sampler(
            sampler_id=sampler_id(self._record.session_id, asked.sampling_session_seq_id or 0),
            tenant=self._record.tenant,
            session_id=self._record.session_id,
            base=self._record.base,
            model_path=None,
            folder=folder,
            is_private=True,
        )
        result = self._answer("save_weights_for_sampler", path=None, sampling_session_id=sampler.sampler_id)
        return RequestOutcome(result=result, record=self._context.saved.insert_sampler(sampler))

    async def _save_external(self, request: FutureRequest, body: bytes, again: bool) -> RequestOutcome:
        asked = parse_body(SaveWeights, body)
        if asked.age_encryption_recipients:
            raise InvalidRequest("files are not encrypted here; leave it out", "age_encryption_recipients")
        return await self._save_weights(request, asked, EXTERNAL, "save_weights_external")

    async def _save_weights(self, request: FutureRequest, asked: SaveWeights, kind: str, answer: str) -> RequestOutcome:
        """Write the adapter alone, in PEFT's format, under a name."""
        path = self._path(asked, kind)
        before = await self._replaced(path, overwrite=False)  # an expired one
        folder = self._context.folder / kind / request.request_id
        await self._trainer.save_weights(self._record.model_id, folder, self.steps, request.request_id)
        return await self._saved(path, folder, asked, answer, before)

    async def _load(self, request: FutureRequest, body: bytes, again: bool) -> RequestOutcome:
        asked = parse_body(LoadWeights, body)
        found = await usable(self._context.saved, self._record.tenant, asked.path)
        if found.base != self._record.base or found.adapter != self._record.adapter:
            raise InvalidRequest(
                f"{asked.path} is an adapter of {found.base} with rank {found.adapter.rank}, and the model is one of "
                f"{self._record.base} with rank {self._record.adapter.rank} (or they are of other layers)",
                "path",
            )
        if asked.optimizer and found.kind != "training":
            raise InvalidRequest(f"{asked.path} has no state of the optimizer, which save_state writes", "optimizer")
        name, trainer = self._record.model_id, self._trainer
        if request.seq_id:
            await trainer.remove(name)
        steps = self.steps
        await self.create(None if asked.optimizer else found.folder)
        self.steps = steps
        if asked.optimizer:
            await trainer.load(name, found.folder.parent, step_of(found.folder))
        result = self._answer("load_weights", path=asked.path, model_id=name)
        return RequestOutcome(result=result, changes=True, save=True)

    def _path(self, asked: SaveWeights, kind: str) -> str:
        name = f"step-{self.steps:06d}" if asked.path is None else asked.path
        if _NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"a checkpoint's name has up to 128 of A-Z, a-z, 0-9, . - _, and can't be {name!r}", "path"
            )
        check_ttl(asked.ttl_seconds)
        return f"{SCHEME}{self._record.model_id}/{kind}/{name}"

    async def _replaced(self, path: str, overwrite: bool) -> Checkpoint | None:
        saved, tenant = self._context.saved, self._record.tenant
        before = await saved.checkpoint(tenant, path)
        if before is not None and not overwrite and not is_over(before, saved):
            raise InvalidRequest(f"there is a checkpoint {path} already; choose another name, or overwrite it", "path")
        if before is None:
            await saved.check_checkpoints(tenant, self._context.limits)
        return before

    async def _check_number(self, number: int | None) -> None:
        """Raise an error unless the session may have an unnamed sampler of this number."""
        if number is None:
            raise InvalidRequest("either path or sampling_session_seq_id has to be given", "path")
        session_id, limits = self._record.session_id, self._context.limits
        if await self._context.saved.known_sampler(session_id, sampler_id(session_id, number), limits) is not None:
            raise InvalidRequest(f"the session has a sampler with the number {number}", "sampling_session_seq_id")

    async def _saved(
        self, path: str, folder: Path, asked: SaveWeights, answer: str, before: Checkpoint | None
    ) -> RequestOutcome:
        """Return the outcome of a request that has written a checkpoint, in place of one of `before`."""
        now = self._context.saved.clock.now()
        size = await in_thread(lambda: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
        saved = Checkpoint(
            path=path,
            tenant=self._record.tenant,
            model_id=self._record.model_id,
            name=path.removeprefix(f"{SCHEME}{self._record.model_id}/"),
            folder=folder,
            base=self._record.base,
            adapter=self._record.adapter,
            data=self._record.data,
            step=self.steps,
            bytes=size,
            created_at=now,
            expires_at=None if asked.ttl_seconds is None else now + asked.ttl_seconds,
            user_metadata=None if asked.user_metadata is None else {k: str(v) for k, v in asked.user_metadata.items()},
        )
        return RequestOutcome(
            result=self._answer(answer, path=path),
            record=self._context.saved.insert_checkpoint(saved),
            removed=None if before is None else files_of(before),
        )

    def _answer(self, kind: str, **values: Any) -> bytes:
        return orjson.dumps({"type": kind, **values})


def optim_params(given: AdamParams) -> OptimParams:
    """Return the numbers of one update."""
    checks: dict[str, Callable[[float], bool]] = {
        "learning_rate": lambda value: value >= 0,
        "beta1": lambda value: 0 <= value < 1,
        "beta2": lambda value: 0 <= value < 1,
        "eps": lambda value: value > 0,
        "weight_decay": lambda value: value >= 0,
        "grad_clip_norm": lambda value: value >= 0,
    }
    for name, good in checks.items():
        value = getattr(given, name)
        if not good(value):
            raise InvalidRequest(f"adam_params.{name} is {value:g}, which is out of range", f"adam_params.{name}")
    return OptimParams(
        learning_rate=given.learning_rate,
        betas=(given.beta1, given.beta2),
        epsilon=given.eps,
        weight_decay=given.weight_decay,
        max_grad_norm=given.grad_clip_norm or math.inf,  # 0 switches it off
    )


def check_ttl(seconds: int | None) -> None:
    """Raise InvalidRequest for an invalid TTL."""
    if seconds is not None and not SHORTEST_TTL <= seconds <= LONGEST_TTL:
        raise InvalidRequest(f"ttl_seconds is {seconds}, and is from {SHORTEST_TTL} to {LONGEST_TTL}", "ttl_seconds")


def sampler_id(session_id: str, number: int) -> str:
    """Return the id of a sampling session."""
    return f"{session_id}:sample:{number}"


def is_over(checkpoint: Checkpoint, saved: Saved) -> bool:
    """Return whether a checkpoint has expired."""
    return checkpoint.expires_at is not None and checkpoint.expires_at <= saved.clock.now()


def files_of(checkpoint: Checkpoint) -> Path:
    """Return the folder that contains only a checkpoint."""
    return checkpoint.folder.parent if checkpoint.kind == "training" else checkpoint.folder


async def usable(saved: Saved, tenant: str, path: str) -> Checkpoint:
    """Return a checkpoint that can be loaded, by its path `tinker://…`."""
    found = await saved.checkpoint(tenant, path)
    if found is None:
        raise NotFound(f"there is no checkpoint {path!r} of this key; it may have been deleted")
    if is_over(found, saved):
        raise NotFound(f"the checkpoint {path!r} has expired (its ttl_seconds are over)")
    return found
