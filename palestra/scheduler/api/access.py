"""Who may call a route: one action of the table of permissions for each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from palestra.errors import NotFound
from palestra.http.bodies import read_request
from palestra.http.guard import bearer
from palestra.scheduler.administration import Administration
from palestra.scheduler.control_store import ControlStore
from palestra.scheduler.identity import Identities, Identity, local_operator
from palestra.scheduler.limits import RequestRates
from palestra.scheduler.permissions import Action
from palestra.scheduler.rules import Rules
from palestra.scheduler.scheduler import Scheduler
from palestra.schemas.jobs import JobRecord
from palestra.threads import WorkPool

B = TypeVar("B", bound=BaseModel)
_IDENTITY = "palestra.identity"  # where the scope of a request has its sender


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlPlane:
    """What the routes use."""

    scheduler: Scheduler
    store: ControlStore
    identities: Identities
    administration: Administration
    rates: RequestRates
    rules: Rules = field(default_factory=Rules)
    without_keys: bool = False  # every request is the operator's; only where no other user can reach the server
    pool: WorkPool = field(default_factory=WorkPool)  # for what would hold up the event loop

    async def who(self, request: Request) -> Identity:
        """Return who sends a request. The request counts, once, against the limits of its key.

        Raises:
            Unauthorized, TooManyRequests: see `Identities.authenticate` and the key's limits.
        """
        known: Identity | None = request.scope.get(_IDENTITY)
        if known is not None:
            return known
        identity = local_operator() if self.without_keys else await self.identities.authenticate(bearer(request))
        if identity.key_id is not None:
            self.rates.count(identity.key_id, identity.limits)
        request.scope[_IDENTITY] = identity
        return identity

    async def body(self, kind: type[B], request: Request) -> B:
        """Read and check the body of a request. Routes call it after their caller's permission was checked.

        Args:
            kind: the model of the body.
            request: its body is not read yet.

        Raises:
            InvalidRequest, ClientDisconnect: see `http.bodies`.
        """
        return await read_request(kind, request, self.pool)

    async def job(self, by: Identity, job_id: str, action: Action) -> JobRecord:
        """Return a job to which `by` may do `action`. Routes get jobs here and nowhere else.

        Args:
            by: who asks.
            job_id: of the job.
            action: what is to be done to it.

        Raises:
            NotFound: there is none in its tenant, or it is another user's private one: the answer is the same.
            Forbidden: it may be seen, and not that.
        """
        job = await self.store.job(by.tenant, job_id)
        if job.private and not by.sees(action, job.user):
            raise NotFound(f"there is no job {job_id}")
        by.require(action, job.user)
        return job

    def may(self, action: Action) -> Callable[[Request], Awaitable[Identity]]:
        """Return a dependency of a route, whose caller has to be allowed `action`, at least on what is their own."""

        async def allowed(request: Request) -> Identity:
            identity = await self.who(request)
            request.state.asked = identity, action
            identity.require(action)
            return identity

        allowed.action = action  # type: ignore[attr-defined]  # for the test that goes through all routes
        return allowed
