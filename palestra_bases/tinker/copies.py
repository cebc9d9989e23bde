"""Copies of checkpoints: a checkpoint of the key, or one that another has published, under a path of the key's own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Connection

from palestra.disk import make_folders, sync, sync_tree
from palestra.errors import InvalidRequest
from palestra.threads import in_thread
from palestra_bases.tinker.records import COPIED, SCHEME, Checkpoint, ModelRecord
from palestra_bases.tinker.training import TinkerContext, check_ttl, usable
from palestra_bases.tinker.wire import CopyWeights


class Copies:
    """Copies checkpoints. A copy keeps its kind, belongs to a model that is never trained, and outlives its source."""

    def __init__(self, context: TinkerContext) -> None:
        self._sessions, self._saved = context.sessions, context.saved
        self._limits, self._folder = context.limits, context.folder
        self._one_at_a_time = asyncio.Lock()

    async def copy(self, tenant: str, asked: CopyWeights, idempotency_key: str | None) -> str:
        """Copy a checkpoint, and return the path of the copy; a retry returns the first path.

        Args:
            idempotency_key: the same in each attempt of one request; None: the request names a model of a session.

        Raises:
            NotFound: the tenant may not use such a checkpoint or session.
            InvalidRequest: the TTL is too short or too long, or the session has another model of this number.
            TooManyRequests: the tenant has too many checkpoints.
        """
        check_ttl(asked.ttl_seconds)
        async with self._one_at_a_time:  # a request and the same one sent again would write the same files
            return await self._copy(tenant, asked, idempotency_key)

    async def _copy(self, tenant: str, asked: CopyWeights, idempotency_key: str | None) -> str:
        source = await usable(self._saved, tenant, asked.source_path)
        session_id, number = await self._place(tenant, asked, idempotency_key)
        model_id = f"{session_id}:train:{number}"
        path = f"{SCHEME}{model_id}/{source.name}"
        if (known := await self._saved.checkpoint(tenant, path)) is not None and known.data.get(COPIED):
            return path
        if any(model.model_id == model_id for model in await self._sessions.models(tenant, session_id)):
            raise InvalidRequest(f"the session has a model with the number {number}", "model_seq_id")
        await self._saved.check_checkpoints(tenant, self._limits)
        now = self._saved.clock.now()
        copied = replace(
            source,
            path=path,
            tenant=tenant,
            model_id=model_id,
            folder=await in_thread(lambda: self._copied(source, model_id)),
            data={**source.data, COPIED: asked.source_path},
            created_at=now,
            expires_at=None if asked.ttl_seconds is None else now + asked.ttl_seconds,
            public=False,
        )
        record = ModelRecord(
            model_id=model_id,
            tenant=tenant,
            session_id=session_id,
            base=source.base,
            adapter=source.adapter,
            seed=0,
            data=copied.data,
            created_at=now,
            used_at=now,
        )
        model, checkpoint = self._sessions.insert_copy(record), self._saved.insert_checkpoint(copied)

        def insert(connection: Connection) -> None:
            model(connection)
            checkpoint(connection)

        await self._saved.write(insert)
        return path

    async def _place(self, tenant: str, asked: CopyWeights, idempotency_key: str | None) -> tuple[str, int]:
        """Return the session of the copy and its number there; without a session the copy gets one of its own."""
        if asked.session_id is not None and asked.model_seq_id is not None:
            await self._sessions.session(tenant, asked.session_id)
            return asked.session_id, asked.model_seq_id
        if not idempotency_key:
            raise InvalidRequest("copy_weights has session_id and model_seq_id, or the header X-Idempotency-Key")
        digest = hashlib.sha256(f"{tenant}\0{idempotency_key}\0{asked.source_path}".encode()).hexdigest()
        return f"session-{digest[:24]}", 0

    def _copied(self, source: Checkpoint, model_id: str) -> Path:
        """Link a checkpoint's files into a folder of the copy, and return the folder.

        Checkpoint files are never rewritten, so that both may share them. Files of the operator's adapters may be, and
        are copied.
        """
        kind, name = source.name.split("/", 1)
        target = self._folder / kind / f"copy-{model_id.replace(':', '-')}-{name}"
        shutil.rmtree(target, ignore_errors=True)  # of an attempt that was cut off
        inside = target / source.folder.name if source.kind == "training" else target
        make_folders(target.parent)
        shutil.copytree(source.folder, inside, copy_function=_link if source.tenant else shutil.copy2)
        sync_tree(target)
        sync(target.parent)
        return inside


def _link(source: str, target: str) -> None:
    """Link a file under another name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
