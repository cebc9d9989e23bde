"""Routes for tenants, users, keys, and the audit log."""

from dataclasses import asdict
from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.requests import Request

from palestra.config.budget import HOUR_MS
from palestra.http.app import request_schema
from palestra_control.wire import (
    AddTenant,
    AddUser,
    AuditEntry,
    ChangeRole,
    ChangeTenant,
    IdentityView,
    KeyView,
    MakeKey,
    NewKeyView,
    SpentBody,
    TenantView,
    UserView,
)
from palestra_service.accounts.identity import Identity
from palestra_service.api.access import ControlPlane
from palestra_service.placement.tenants import Quota
from palestra_service.rights import KeyRecord, NewKey, Role
from palestra_service.store.allowances import Spent


def add_account_routes(app: FastAPI, plane: ControlPlane) -> None:
    """Add the routes for tenants, users, and the audit log to the application."""
    accounts = plane.administration

    @app.get("/me", tags=["accounts"])
    async def me(by: Annotated[Identity, Depends(plane.member)]) -> IdentityView:
        """Return the tenant, the user and the role of the calling key."""
        return IdentityView(tenant=by.tenant, user=by.user, role=by.role.value, operator=by.is_operator)

    @app.get("/tenants", tags=["accounts"])
    async def tenants(by: Annotated[Identity, Depends(plane.operator)]) -> list[TenantView]:
        """Return all tenants, with their quotas."""
        found = await accounts.tenants(by)
        return [_tenant(name, *one) for name, one in found.items()]

    @app.post("/tenants", tags=["accounts"], status_code=201, openapi_extra=request_schema(AddTenant))
    async def add_tenant(request: Request, by: Annotated[Identity, Depends(plane.operator)]) -> NewKeyView:
        """Add a tenant with one admin; the answer has the admin's key, with its secret."""
        body = await plane.body(AddTenant, request)
        return _new_key(await accounts.add_tenant(by, body.name))

    @app.patch("/tenants/{name}", tags=["accounts"], openapi_extra=request_schema(ChangeTenant))
    async def change_tenant(
        name: str, request: Request, by: Annotated[Identity, Depends(plane.operator)]
    ) -> TenantView:
        """Change a quota immediately: omitted limits are unchanged, and null removes a limit.

        Running jobs continue.
        """
        body = await plane.body(ChangeTenant, request)
        return _tenant(name, *await accounts.change_quota(by, name, body.quota.model_dump(exclude_unset=True)))

    @app.post("/tenants/{name}/keys", tags=["accounts"], status_code=201)
    async def make_admin_key(name: str, by: Annotated[Identity, Depends(plane.operator)]) -> NewKeyView:
        """Create another key of a tenant's admin; its secret is only in this answer."""
        return _new_key(await accounts.admin_key(by, name))

    @app.get("/users", tags=["accounts"])
    async def users(by: Annotated[Identity, Depends(plane.admin)]) -> list[UserView]:
        """Return all users of the tenant, including removed ones."""
        return [UserView.model_validate(user, from_attributes=True) for user in await accounts.users(by)]

    @app.post("/users", tags=["accounts"], status_code=201, openapi_extra=request_schema(AddUser))
    async def add_user(request: Request, by: Annotated[Identity, Depends(plane.admin)]) -> NewKeyView:
        """Add a user with one key; the answer has the key, with its secret."""
        body = await plane.body(AddUser, request)
        return _new_key(await accounts.add_user(by, body.name, Role(body.role)))

    @app.patch("/users/{name}", tags=["accounts"], status_code=204, openapi_extra=request_schema(ChangeRole))
    async def change_role(name: str, request: Request, by: Annotated[Identity, Depends(plane.admin)]) -> None:
        """Change a user's role immediately, including the user's keys."""
        body = await plane.body(ChangeRole, request)
        await accounts.change_role(by, name, Role(body.role))

    @app.delete("/users/{name}", tags=["accounts"], status_code=204)
    async def remove_user(name: str, by: Annotated[Identity, Depends(plane.admin)]) -> None:
        """Remove a user and revoke the user's keys."""
        await accounts.remove_user(by, name)

    @app.get("/audit", tags=["accounts"])
    async def audit(
        by: Annotated[Identity, Depends(plane.admin)], before: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        """Return the tenant's audit log, newest lines first."""
        return await plane.store.audit(by.tenant, before, limit)


def add_key_routes(app: FastAPI, plane: ControlPlane) -> None:
    """Add the routes for keys to the application."""
    accounts = plane.administration

    @app.get("/keys", tags=["accounts"])
    async def keys(by: Annotated[Identity, Depends(plane.member)], user: str | None = None) -> list[KeyView]:
        """Return the caller's keys, or, for an admin, another user's."""
        return [KeyView.model_validate(_shown(key)) for key in await accounts.keys(by, user)]

    @app.post("/keys", tags=["accounts"], status_code=201, openapi_extra=request_schema(MakeKey))
    async def create_key(request: Request, by: Annotated[Identity, Depends(plane.member)]) -> NewKeyView:
        """Create a key; its secret is only in this answer."""
        body = await plane.body(MakeKey, request)
        limits = None if body.limits is None else body.limits.model_dump(exclude_none=True)
        return _new_key(await accounts.create_key(by, body.user, body.label, body.lifetime_seconds, limits))

    @app.delete("/keys/{key_id}", tags=["accounts"], status_code=204)
    async def revoke(key_id: str, by: Annotated[Identity, Depends(plane.member)]) -> None:
        """Revoke a key."""
        await accounts.revoke_key(by, key_id)


def _shown(key: KeyRecord) -> dict[str, object]:
    shown: dict[str, object] = {name: getattr(key, name) for name in KeyView.model_fields}
    return shown | {"limits": asdict(key.limits)}


def _tenant(name: str, quota: Quota, spent: Spent) -> TenantView:
    shown = spent_body(spent) if quota.has_budget else None
    return TenantView(name=name, quota=quota, spent=shown)


def spent_body(spent: Spent) -> SpentBody:
    """Return what jobs have spent as the body of an answer."""
    return SpentBody(money=spent.micros / 1e6, hours=spent.ms / HOUR_MS, tokens=spent.tokens)


def _new_key(key: NewKey) -> NewKeyView:
    return NewKeyView.model_validate(_shown(key.record) | {"secret": key.secret})
