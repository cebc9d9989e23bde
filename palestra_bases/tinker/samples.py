"""The samplers of all tenants: they are made, and requests for samples are accepted and executed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from palestra.engine.base import Engine
from palestra.errors import InvalidRequest, PalestraError, StoreError
from palestra.http.bodies import parse_body
from palestra.threads import in_thread
from palestra_bases.models import AdapterCache
from palestra_bases.tinker.bases import Base
from palestra_bases.tinker.journal import NewRequest
from palestra_bases.tinker.model import INTERNAL
from palestra_bases.tinker.records import FutureRequest, Sampler
from palestra_bases.tinker.sampling import Plan, plan_of, policy_name, sample_response
from palestra_bases.tinker.tables import PENDING
from palestra_bases.tinker.training import TinkerContext, sampler_id, usable
from palestra_bases.tinker.wire import CreateSamplingSession, Sample

log = logging.getLogger("palestra.tinker")
# Loads an adapter's folder into the engine, as a policy of the given name.
LoadFolder = Callable[[str, Path], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What samples.

    Attributes:
        adapters: those that the engine has without their being trained.
        load: loads an adapter's folder.
    """

    engine: Engine
    adapters: AdapterCache
    load: LoadFolder


class Samples:
    """Accepts sampling requests, and has the engine answer them."""

    def __init__(self, sampling: Sampling, context: TinkerContext) -> None:
        self._engine, self._adapters, self._load = sampling.engine, sampling.adapters, sampling.load
        self._bases, self._limits, self._spawn = context.bases, context.limits, context.spawn
        self._journal, self._sessions, self._saved = context.journal, context.sessions, context.saved
        self._settled = context.settled
        self._tasks: dict[str, tuple[FutureRequest, asyncio.Task[None]]] = {}  # by id of the request

    async def create(self, tenant: str, body: bytes) -> Sampler:
        """Create a sampling session of a base model or a checkpoint (`wire.CreateSamplingSession`).

        Raises:
            NotFound: no such session, base model or checkpoint.
            InvalidRequest: the session has a sampler of other weights with this number.
            TooManyRequests: the session has too many samplers.
        """
        asked = parse_body(CreateSamplingSession, body)
        await self._sessions.session(tenant, asked.session_id)
        folder = None
        if asked.model_path is not None:
            found = await usable(self._saved, tenant, asked.model_path)
            if asked.base_model not in (None, found.base):
                raise InvalidRequest(
                    f"{asked.model_path} is an adapter of {found.base}, and base_model is {asked.base_model}",
                    "base_model",
                )
            name, folder = self._bases.of(found.base).name, found.folder
        elif asked.base_model is not None:
            name = self._bases.of(asked.base_model).name
        else:
            raise InvalidRequest("either base_model or model_path has to be given", "base_model")
        sampler = Sampler(
            sampler_id=sampler_id(asked.session_id, asked.sampling_session_seq_id),
            tenant=tenant,
            session_id=asked.session_id,
            base=name,
            model_path=asked.model_path,
            folder=folder,
        )
        known = await self._saved.known_sampler(asked.session_id, sampler.sampler_id, self._limits)
        if known is not None and known != sampler:
            raise InvalidRequest(
                f"{known.sampler_id} is a sampler of {known.model_path or 'other weights'}", "sampling_session_seq_id"
            )
        if known is None:
            await self._saved.write(self._saved.insert_sampler(sampler))
        return sampler

    async def accept(self, tenant: str, asked: Sample, body: bytes) -> str:
        """Accept a sampling request, and return its id.

        Raises:
            NotFound: no such sampling session, or its checkpoint was removed.
            InvalidRequest: it cannot be answered.
            TooManyRequests: too many requests of the tenant wait, or too many sequences in them.
        """
        sampler = await self._sampler(tenant, asked.sampling_session_id)
        plan_of(asked, self._bases.of(sampler.base), self._limits, "")
        request = NewRequest(
            tenant=tenant,
            kind="sample",
            target=sampler.sampler_id,
            seq_id=asked.seq_id,
            body=body,
            sequences=asked.num_samples,
        )
        request_id, is_new = await self._journal.accept(request, self._limits)
        if is_new:
            self.start(await self._journal.with_body(request_id))
        return request_id

    async def _sampler(self, tenant: str, name: str) -> Sampler:
        sampler = await self._saved.sampler(tenant, name)
        if sampler.model_path is not None:
            await usable(self._saved, tenant, sampler.model_path)
        return sampler

    def start(self, request: FutureRequest) -> None:
        """Execute an accepted request."""
        task = self._spawn(request.request_id, self._sample(request))
        self._tasks[request.request_id] = request, task
        task.add_done_callback(lambda _: self._tasks.pop(request.request_id, None))

    async def _sample(self, request: FutureRequest) -> None:
        try:
            sampler = await self._sampler(request.tenant, request.target)
            base = self._bases.of(sampler.base)
            plan: Plan = plan_of(parse_body(Sample, request.body or b""), base, self._limits, request.request_id)
            async with self._policy_of(sampler, base) as policy:
                result = await sample_response(self._engine, policy, plan, base)
        except StoreError:
            raise
        except PalestraError as error:
            await self._journal.fail(request, str(error), "user" if error.http_status < 500 else "server")
        except Exception:
            log.exception("sampling from %s failed", request.target)
            await self._journal.fail(request, INTERNAL, "server")
        else:
            await self._journal.finish(request, result)
        self._settle(request)

    @contextlib.asynccontextmanager
    async def _policy_of(self, sampler: Sampler, base: Base) -> AsyncIterator[str]:
        folder = sampler.folder
        if folder is None:
            yield base.policy
            return
        name = policy_name(folder)
        async with self._adapters.loaded(name, lambda policy: self._load(policy, folder)):
            yield name

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a sampling request; no effect on another kind, or one with a result."""
        await self._journal.request(tenant, request_id)
        if (found := self._tasks.get(request_id)) is not None:
            await self._stop(*found, "the request was cancelled")

    async def _stop(self, request: FutureRequest, task: asyncio.Task[None], why: str) -> None:
        task.cancel()
        await asyncio.wait((task,))
        if (await self._journal.request(request.tenant, request.request_id)).state == PENDING:
            await self._journal.fail(request, why, "user")
            self._settle(request)

    def _settle(self, request: FutureRequest) -> None:
        self._settled(request.request_id)
        self._settled(request.target)

    async def remove(self, folder: Path) -> None:
        """Remove an adapter's files, and free its memory in the engine."""
        await self._adapters.remove(policy_name(folder))
        await in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))

    async def drop(self, session_id: str, why: str) -> None:
        """Cancel a session's sampling."""
        samplers = {sampler.sampler_id for sampler in await self._saved.samplers(session_id)}
        for request, task in [found for found in self._tasks.values() if found[0].target in samplers]:
            await self._stop(request, task, why)

    async def end_session(self, session_id: str) -> None:
        """Remove a session's samplers with their private weights, and cancel their sampling."""
        await self.drop(session_id, "the session has ended")
        for sampler in await self._saved.samplers(session_id):
            await self._saved.remove_sampler(sampler.sampler_id)
            if sampler.is_private and sampler.folder is not None:
                await self.remove(sampler.folder)
