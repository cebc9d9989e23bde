"""Access to routes: each is for members, admins or operators."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import Request

from palestra.errors import Forbidden, InvalidRequest
from palestra.http.bodies import read_request
from palestra.http.guard import bearer
from palestra.threads import WorkPool
from palestra_control.jobs import JobRecord
from palestra_service.accounts.administration import Administration
from palestra_service.accounts.identity import Identities, Identity, local_operator
from palestra_service.jobs.rules import Rules
from palestra_service.jobs.scheduler import JobScheduler
from palestra_service.rights import RequestRates
from palestra_service.store.control_store import ControlStore

B = TypeVar("B", bound=BaseModel)
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_IDENTITY = "palestra.identity"  # key in the ASGI scope of a request, whose value is its sender


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlPlane:
    """The objects used by the control plane's routes.

    Attributes:
        without_keys: whether every request is the operator's; only for a server that no other user can reach.
    """

    scheduler: JobScheduler
    store: ControlStore
    identities: Identities
    administration: Administration
    rates: RequestRates
    rules: Rules = field(default_factory=Rules)
    without_keys: bool = False
    pool: WorkPool = field(default_factory=WorkPool)

    async def who(self, request: Request) -> Identity:
        """Return the sender of a request, and count the request against its key's limits.

        Without keys, raises Forbidden or InvalidRequest for what a page of another server may have sent.
        """
        known: Identity | None = request.scope.get(_IDENTITY)
        if known is not None:
            return known
        if self.without_keys:
            _check_local(request)
            identity = local_operator()
        else:
            identity = await self.identities.authenticate(bearer(request))
        if identity.key_id is not None:
            self.rates.count(identity.key_id, identity.limits)
        request.scope[_IDENTITY] = identity
        return identity

    async def body(self, kind: type[B], request: Request) -> B:
        """Read and validate the body of a request. Routes call it after checking the caller's permission.

        Raises InvalidRequest or ClientDisconnect; see `http.bodies`.
        """
        return await read_request(kind, request, self.pool)

    async def job(self, by: Identity, job_id: str, *, own: bool = False) -> JobRecord:
        """Return a job of the caller's tenant; the only access of routes to jobs. `own`: refuse another user's."""
        job = await self.store.job(by.tenant, job_id)
        if own:
            by.require_own(job.user)
        return job

    async def log(self, by: Identity, what: str, target: str) -> None:
        """Append a caller's action to the audit log."""
        await self.store.append_audit(by.tenant, by.user, by.key_id, what, target)

    # Dependencies of routes, one of each. They refuse before a body is read.

    async def member(self, request: Request) -> Identity:
        """Return the sender, any user of a tenant."""
        return await self.who(request)

    async def admin(self, request: Request) -> Identity:
        """Return the sender, an admin."""
        identity = await self.who(request)
        identity.require_admin()
        return identity

    async def operator(self, request: Request) -> Identity:
        """Return the sender, an operator of the cluster."""
        identity = await self.who(request)
        identity.require_operator()
        return identity


def _check_local(request: Request) -> None:
    """Raise an error for a request that a web page of another server may have sent, on a server without keys.

    A page can make the browser send requests to this machine. Those without a preflight are forms or plain texts, and
    name the page in `Origin`. If the page's own name resolves to this machine, `Host` has that name.

    Raises:
        Forbidden: the request is for another host name than this machine's, or comes from another page.
        InvalidRequest: its body is not declared as JSON.
    """
    headers = Headers(scope=request.scope)  # all of one name; the door's own keep the first
    hosts = headers.getlist("host")
    if len(hosts) != 1 or _LOCAL_HOST.fullmatch(hosts[0]) is None:
        raise Forbidden("this server asks for no keys, so it answers only under http://127.0.0.1, localhost or [::1]")
    foreign = any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin"))
    if foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Forbidden("this server asks for no keys, so it answers no page of another server")
    has_body = headers.get("content-length", "0").strip("0 ") != "" or "transfer-encoding" in headers
    if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest(
            "this server asks for no keys, so it takes bodies only with Content-Type: application/json"
        )
