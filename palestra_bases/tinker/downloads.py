"""Signed links to files of external weights: a link opens one file for an hour, without a key.

A link names its tenant and is signed with that tenant's key (HMAC-SHA256), so that it expires with the key.
"""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from palestra.errors import InvalidRequest, NotFound, Unauthorized
from palestra.http.tenant_keys import Tenants
from palestra.threads import in_thread
from palestra.types.clock import Clock
from palestra_bases.tinker.records import EXTERNAL, SCHEME, Checkpoint
from palestra_bases.tinker.saved import Saved
from palestra_bases.tinker.training import usable

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
        """Return the path of a link, with its signature. `expires`: in Unix seconds."""
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
        ends = datetime.fromtimestamp(expires, UTC).isoformat()
        return Response(orjson.dumps({"urls": urls, "expires": ends}), media_type="application/json")

    @app.get(f"{FILES}{{model_id}}/{{name}}/{{file:path}}")
    async def external_weights_file(model_id: str, name: str, file: str, request: Request) -> Response:
        """Send a file of external weights; the link is the key."""
        path = f"{SCHEME}{model_id}/{EXTERNAL}/{name}"
        found = await usable(saved, links.tenant(request), path)
        if file not in await in_thread(lambda: _files(found)):
            raise NotFound(f"{path} has no file {file!r}")
        return FileResponse(found.folder / file, media_type="application/octet-stream")


def _files(checkpoint: Checkpoint) -> list[str]:
    """Return the files of a checkpoint, relative to its folder."""
    folder: Path = checkpoint.folder
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
