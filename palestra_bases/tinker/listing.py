"""The routes of the Tinker API that list, delete, keep and download: training runs, checkpoints, sessions, files."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from palestra.errors import InvalidRequest, NotFound, Unauthorized
from palestra.http.bodies import parse_body
from palestra.threads import in_thread
from palestra.types.clock import Clock
from palestra_bases.tenant_keys import Tenants
from palestra_bases.tinker.records import EXTERNAL, SCHEME, Checkpoint, ModelRecord
from palestra_bases.tinker.saved import Saved
from palestra_bases.tinker.service import TinkerService
from palestra_bases.tinker.training import usable
from palestra_bases.tinker.wire import SetTTL, WeightsInfo

API = "/api/v1"
MOST_LISTED = 1000
TenantOf = Callable[[Request], str]


def add_listing(app: FastAPI, service: TinkerService, tenant_of: TenantOf) -> None:
    """Add the routes."""
    _add_runs(app, service, tenant_of)
    _add_checkpoints(app, service, tenant_of)
    _add_sessions(app, service, tenant_of)


def _add_runs(app: FastAPI, service: TinkerService, tenant_of: TenantOf) -> None:
    async def described(record: ModelRecord) -> dict[str, Any]:
        saved = await service.saved.checkpoints(record.tenant, record.model_id)
        newest = {kind: next((c for c in saved if c.kind == kind), None) for kind in ("training", "sampler")}
        return {
            "training_run_id": record.model_id,
            "base_model": record.base,
            "model_owner": record.tenant,
            "is_lora": True,
            "lora_rank": record.adapter.rank,
            "corrupted": False,
            "last_request_time": _time(record.used_at),
            "last_checkpoint": _checkpoint(newest["training"]),
            "last_sampler_checkpoint": _checkpoint(newest["sampler"]),
            "user_metadata": _texts(record.data.get("user_metadata")),
        }

    @app.get(f"{API}/training_runs")
    async def training_runs(request: Request, limit: int = 20, offset: int = 0) -> Response:
        """List the models of the key, newest first."""
        found = await service.sessions.models(tenant_of(request))
        shown, cursor = _page(found, limit, offset)
        return json_answer({"training_runs": [await described(record) for record in shown], "cursor": cursor})

    @app.get(f"{API}/training_runs/{{model_id}}")
    async def training_run(model_id: str, request: Request) -> Response:
        """Describe one model of the key, with its newest checkpoints."""
        return json_answer(await described(await service.sessions.model(tenant_of(request), model_id)))


def _add_checkpoints(app: FastAPI, service: TinkerService, tenant_of: TenantOf) -> None:
    def path_of(model_id: str, checkpoint_id: str) -> str:
        return f"{SCHEME}{model_id}/{checkpoint_id}"

    @app.get(f"{API}/training_runs/{{model_id}}/checkpoints")
    async def of_run(model_id: str, request: Request) -> Response:
        """List the checkpoints of one model, newest first."""
        tenant = tenant_of(request)
        await service.sessions.model(tenant, model_id)
        found = await service.saved.checkpoints(tenant, model_id)
        return json_answer({"checkpoints": [_checkpoint(one) for one in found]})

    @app.get(f"{API}/checkpoints")
    async def of_user(request: Request, limit: int = 100, offset: int = 0) -> Response:
        """List the checkpoints of the key, newest first."""
        shown, cursor = _page(await service.saved.checkpoints(tenant_of(request)), limit, offset)
        return json_answer({"checkpoints": [_checkpoint(one) for one in shown], "cursor": cursor})

    @app.put(f"{API}/training_runs/{{model_id}}/checkpoints/{{checkpoint_id:path}}/ttl")
    async def set_ttl(model_id: str, checkpoint_id: str, request: Request) -> Response:
        """Set a checkpoint's TTL."""
        asked = parse_body(SetTTL, await request.body())
        await service.set_ttl(tenant_of(request), path_of(model_id, checkpoint_id), asked.ttl_seconds)
        return json_answer({})

    def add_publish(method: str, public: bool) -> None:
        @app.api_route(
            f"{API}/training_runs/{{model_id}}/checkpoints/{{checkpoint_id:path}}/publish",
            methods=[method],
            name="publish" if public else "unpublish",
        )
        async def publish(model_id: str, checkpoint_id: str, request: Request) -> Response:
            """Let all tenants load and sample a checkpoint, or its own tenant alone."""
            await service.publish(tenant_of(request), path_of(model_id, checkpoint_id), public)
            return json_answer({})

    add_publish("POST", public=True)
    add_publish("DELETE", public=False)

    @app.delete(f"{API}/training_runs/{{model_id}}/checkpoints/{{checkpoint_id:path}}")
    async def delete(model_id: str, checkpoint_id: str, request: Request) -> Response:
        """Delete a checkpoint of the key, with its files."""
        await service.delete_checkpoint(tenant_of(request), path_of(model_id, checkpoint_id))
        return json_answer({})

    @app.post(f"{API}/weights_info")
    async def weights_info(request: Request) -> Response:
        """Return the model information of a checkpoint."""
        asked = parse_body(WeightsInfo, await request.body())
        found = await usable(service.saved, tenant_of(request), asked.tinker_path)
        layers: Mapping[str, Any] = found.data.get("layers", {})
        return json_answer(
            {
                "base_model": found.base,
                "optimizer_config": {"type": "adamw"},
                "is_lora": True,
                "lora_rank": found.adapter.rank,
                **{name: layers.get(name) for name in ("train_unembed", "train_mlp", "train_attn")},
            }
        )


def _add_sessions(app: FastAPI, service: TinkerService, tenant_of: TenantOf) -> None:
    @app.get(f"{API}/sessions")
    async def sessions(request: Request, limit: int = 20, offset: int = 0) -> Response:
        """List the sessions of the key, newest first."""
        shown, _ = _page(await service.sessions.sessions(tenant_of(request)), limit, offset)
        return json_answer({"sessions": shown})

    @app.get(f"{API}/sessions/{{session_id}}")
    async def session(session_id: str, request: Request) -> Response:
        """Describe one session of the key: its models and samplers."""
        tenant = tenant_of(request)
        data = (await service.sessions.session(tenant, session_id)).data
        return json_answer(
            {
                "training_run_ids": [m.model_id for m in await service.sessions.models(tenant, session_id)],
                "sampler_ids": [s.sampler_id for s in await service.saved.samplers(session_id)],
                "user_metadata": _texts(data.get("user_metadata")),
                "display_name": data.get("display_name"),
            }
        )


def _page(found: Sequence[Any], limit: int, offset: int) -> tuple[Sequence[Any], dict[str, int]]:
    if limit < 0 or offset < 0:
        raise InvalidRequest("limit and offset are not negative", "limit")
    most = min(limit, MOST_LISTED)
    return found[offset : offset + most], {"offset": offset, "limit": most, "total_count": len(found)}


def _checkpoint(found: Checkpoint | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "checkpoint_id": found.name,
        "checkpoint_type": found.kind,
        "time": _time(found.created_at),
        "tinker_path": found.path,
        "size_bytes": found.bytes,
        "public": found.public,
        "user_metadata": found.user_metadata,
        "expires_at": None if found.expires_at is None else _time(found.expires_at),
    }


def _time(seconds: float) -> str:
    """Return a time as the API writes it: ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _texts(metadata: Any) -> dict[str, str] | None:
    return {key: str(value) for key, value in metadata.items()} if isinstance(metadata, Mapping) else None


def json_answer(value: Any, status: int = 200) -> Response:
    """Return an answer of the API."""
    return Response(orjson.dumps(value), status, media_type="application/json")


FILES = "/api/v1/external_weights/"
LINK_SECONDS = 3600


class Links:
    """Signs links to files, and checks them."""

    def __init__(self, tenants: Tenants, clock: Clock) -> None:
        self._tenants, self._clock = tenants, clock

    def expiry(self) -> int:
        """Return when a new link expires, in Unix seconds."""
        return int(self._clock.now()) + LINK_SECONDS

    def link(self, tenant: str, model_id: str, name: str, file: str, expires: int) -> str:
        """Return the path of a link, with its signature. It expires at `expires`, in Unix seconds."""
        path = f"{FILES}{model_id}/{name}/{file}"
        given = {"tenant": tenant, "expires": expires, "signature": self._signature(tenant, path, str(expires))}
        return f"{quote(path)}?{urlencode(given)}"

    def tenant(self, request: Request) -> str:
        """Return the tenant of a link."""
        given = request.query_params
        tenant, expires = given.get("tenant", ""), given.get("expires", "")
        wanted = self._signature(tenant, request.scope["path"], expires)
        good = hmac.compare_digest(wanted.encode(), given.get("signature", "").encode())
        if not good or not expires.isdecimal() or int(expires) <= self._clock.now():
            raise Unauthorized("this link is not valid, or no longer; ask for the links of the checkpoint again")
        return tenant

    def _signature(self, tenant: str, path: str, expires: str) -> str:
        return hmac.digest(self._tenants.secret(tenant), f"{tenant}\n{path}\n{expires}".encode(), "sha256").hex()


def add_downloads(app: FastAPI, saved: Saved, links: Links, tenant_of: Any) -> None:
    """Add the routes for links to files of external weights, and for the files."""

    @app.get("/api/v1/training_runs/{model_id}/checkpoints/{checkpoint_id:path}/external_weights_urls")
    async def external_weights_urls(model_id: str, checkpoint_id: str, request: Request) -> Response:
        """Give a link to each file of external weights of the key."""
        tenant = tenant_of(request)
        found = await usable(saved, tenant, f"{SCHEME}{model_id}/{checkpoint_id}")
        kind, _, name = checkpoint_id.partition("/")
        if kind != EXTERNAL:
            raise InvalidRequest(f"{found.path} has no links: save_weights_external writes files for others", "path")
        expires, server = links.expiry(), str(request.base_url).rstrip("/")
        urls = {
            file: server + links.link(tenant, model_id, name, file, expires)
            for file in await in_thread(lambda: _files(found))
        }
        return json_answer({"urls": urls, "expires": _time(expires)})

    @app.get(f"{FILES}{{model_id}}/{{name}}/{{file:path}}")
    async def external_weights_file(model_id: str, name: str, file: str, request: Request) -> Response:
        """Send a file of external weights; the link is the key."""
        path = f"{SCHEME}{model_id}/{EXTERNAL}/{name}"
        found = await usable(saved, links.tenant(request), path)
        if file not in await in_thread(lambda: _files(found)):
            raise NotFound(f"{path} has no file {file!r}")
        return FileResponse(found.folder / file, media_type="application/octet-stream")


def _files(checkpoint: Checkpoint) -> list[str]:
    folder: Path = checkpoint.folder
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
