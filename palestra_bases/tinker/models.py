"""The models of all tenants: their creation and their requests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import orjson

from palestra.config import AdapterConfig
from palestra.errors import InvalidRequest
from palestra.http.bodies import parse_body
from palestra_bases.tinker.bases import Base
from palestra_bases.tinker.journal import NewRequest
from palestra_bases.tinker.model import Model
from palestra_bases.tinker.records import COPIED, ModelRecord
from palestra_bases.tinker.training import TinkerContext, usable
from palestra_bases.tinker.wire import CreateModel, LoadWeights


class Models:
    """Accepts requests to models, and executes them."""

    def __init__(self, context: TinkerContext) -> None:
        self._context, self._journal, self._sessions = context, context.journal, context.sessions
        self._models: dict[str, Model] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by model

    def in_memory(self) -> list[Model]:
        """Return the models that execute or await requests."""
        return list(self._models.values())

    async def unload(self, model_id: str) -> None:
        """Unload a model unless it is busy; it is restored when used."""
        model = self._models.get(model_id)
        if model is not None and not model.is_busy:
            await model.unload()
            present = self._models.get(model_id)
            if present is not model or present.is_busy:  # a request has come meanwhile
                return
            self._models.pop(model_id)
            self._tasks.pop(model_id).cancel()
            # A request that has come meanwhile may have woken the task that has just been cancelled.
            if await self._journal.next_request(model_id) is not None:
                self.notify(await self._sessions.model(model.record.tenant, model_id))

    async def create(self, tenant: str, body: bytes) -> tuple[str, str]:
        """Accept the creation of a model (`wire.CreateModel`); return the ids of the request and the model.

        Raises:
            NotFound: no such session or base model.
            InvalidRequest: the adapter cannot be created.
            TooManyRequests: the tenant has too many models.
        """
        asked = parse_body(CreateModel, body)
        _check_adam(asked.optimizer_config.type)
        lora = asked.lora_config
        if lora is None:
            raise InvalidRequest("lora_config is missing, and only adapters are trained here", "lora_config")
        base = self._context.bases.of(asked.base_model)
        adapter = base.adapter(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)
        data = {"layers": lora.model_dump(include={"train_attn", "train_mlp", "train_unembed"})}
        record = await self._new_model(
            tenant, (asked.session_id, asked.model_seq_id), base, adapter, lora.seed, data, asked.user_metadata
        )
        return await self._accept_first("create_model", record, body), record.model_id

    async def load(self, tenant: str, body: bytes) -> tuple[str, str]:
        """Accept the loading of a checkpoint (`wire.LoadWeights`); return the ids of the request and the model.

        With a session, the checkpoint becomes a new model.

        Raises:
            NotFound: no such session, model or checkpoint.
            InvalidRequest: the checkpoint has another base model.
            TooManyRequests: the tenant has too many models.
        """
        asked = parse_body(LoadWeights, body)
        if asked.optimizer_config is not None:
            _check_adam(asked.optimizer_config.type)
        if asked.session_id is None or asked.model_seq_id is None:
            if asked.model_id is None or asked.seq_id is None:
                raise InvalidRequest("load_weights has session_id and model_seq_id, or model_id and seq_id")
            return await self.train(tenant, "load_weights", asked.model_id, asked.seq_id, body), asked.model_id
        found = await usable(self._context.saved, tenant, asked.path)
        if asked.base_model is not None and asked.base_model != found.base:
            raise InvalidRequest(
                f"{asked.path} is an adapter of {found.base}, and base_model is {asked.base_model}", "base_model"
            )
        record = await self._new_model(
            tenant,
            (asked.session_id, asked.model_seq_id),
            self._context.bases.of(found.base),
            found.adapter,
            0,
            {name: value for name, value in found.data.items() if name not in ("user_metadata", COPIED)},
            asked.user_metadata,
        )
        return await self._accept_first("load_weights", record, body), record.model_id

    async def _new_model(
        self,
        tenant: str,
        number: tuple[str, int],
        base: Base,
        adapter: AdapterConfig,
        seed: int | None,
        data: Mapping[str, Any],
        user_metadata: Mapping[str, Any] | None,
    ) -> ModelRecord:
        session = await self._sessions.session(tenant, number[0])
        if session.finished_at is not None:
            raise InvalidRequest(f"the session {number[0]} is finished; make another ServiceClient", "session_id")
        now = self._sessions.clock.now()
        return ModelRecord(
            model_id=f"{number[0]}:train:{number[1]}",
            tenant=tenant,
            session_id=number[0],
            base=base.name,
            adapter=adapter,
            seed=secrets.randbits(31) if seed is None else seed % 2**31,
            data={**data, "user_metadata": user_metadata},
            created_at=now,
            used_at=now,
        )

    async def _accept_first(self, kind: str, record: ModelRecord, body: bytes) -> str:
        """Accept the request that makes a model, and return its id."""
        limits = self._context.limits
        insert = self._sessions.insert_model(record, limits.models, limits.session_seconds)
        request = NewRequest(tenant=record.tenant, kind=kind, target=record.model_id, seq_id=0, body=body)
        request_id, is_new = await self._journal.accept(request, limits, insert)
        if is_new:
            self.notify(record)
        return request_id

    async def train(self, tenant: str, kind: str, model_id: str, seq_id: int, body: bytes) -> str:
        """Accept a request to a model, and return its id; it is executed after all earlier ones.

        Raises:
            NotFound: the tenant has no such model.
            InvalidRequest: another request had the number, or the model belongs to a copied checkpoint.
            TooManyRequests: too many requests of the tenant wait.
        """
        record = await self._sessions.model(tenant, model_id)
        if COPIED in record.data:
            raise InvalidRequest(
                f"{model_id} has a copy of {record.data[COPIED]}, and is never trained; make a training client from "
                "the copy's path"
            )
        request = NewRequest(
            tenant=tenant, kind=kind, target=model_id, seq_id=seq_id, body=body, identity=_identity(kind, body)
        )
        request_id, _ = await self._journal.accept(request, self._context.limits)
        self.notify(record)
        return request_id

    def notify(self, record: ModelRecord) -> None:
        """Make a model check for its requests."""
        name = record.model_id
        if name not in self._models:
            self._models[name] = Model(record, self._context)
            self._tasks[name] = self._context.spawn(name, self._run(self._models[name]))
        self._models[name].notify()

    async def _run(self, model: Model) -> None:
        try:
            await model.run()
        finally:
            name = model.record.model_id
            if self._models.get(name) is model:  # there may be another by now
                del self._models[name], self._tasks[name]


def _identity(kind: str, body: bytes) -> bytes | None:
    """Return what identifies a retried request; None: the whole body.

    The SDK gives unnamed sampler weights another number at each attempt; the first counts.
    """
    if kind != "save_for_sampler":
        return None
    try:
        fields = orjson.loads(body)
        fields.pop("sampling_session_seq_id", None)
        return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    except (ValueError, TypeError):  # a number or text that is refused later, or an ignored field is nested too deep
        return None


def _check_adam(kind: str) -> None:
    if kind != "adamw":
        raise InvalidRequest(f"the optimizer {kind!r} is not supported here; adamw is", "optimizer_config.type")
