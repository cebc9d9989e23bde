"""The operator's stored decisions: quotas, and whether jobs may start. Operations on a connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import orjson
from sqlalchemy import Connection, select

from palestra.database import to_json
from palestra.errors import NotFound
from palestra_service.placement.placement import PlacementPolicy
from palestra_service.placement.tenants import Quota
from palestra_service.store.tables import meta, tenants

_DRAINING = "draining"


def with_stored_quotas(connection: Connection, policy: PlacementPolicy) -> PlacementPolicy:
    """Return a policy with the stored quotas and draining state."""
    quotas = {name: quota for name, quota in quotas_of_all(connection).items() if quota is not None}
    return replace(policy, quotas=quotas, draining=is_draining(connection))


def quotas_of_all(connection: Connection) -> dict[str, Quota | None]:
    """Return the quotas of all tenants by name; None: no quota."""
    rows = connection.execute(select(tenants.c.name, tenants.c.quota).order_by(tenants.c.name))
    return {name: _quota(text) for name, text in rows}


def quota_of(connection: Connection, tenant: str) -> Quota | None:
    """Return the quota of one tenant; None: no quota."""
    return _quota(connection.execute(select(tenants.c.quota).where(tenants.c.name == tenant)).scalar())


def change_quota(connection: Connection, tenant: str, changes: Mapping[str, float | None]) -> Quota:
    """Change amounts of a tenant's quota, by the names of `Quota`, and return the whole. None: unlimited."""
    row = connection.execute(select(tenants.c.quota).where(tenants.c.name == tenant)).first()
    if row is None:
        raise NotFound(f"there is no tenant {tenant}")
    quota = Quota(**{**(_quota(row.quota) or Quota()).model_dump(), **changes})
    limited = quota.model_dump(exclude_none=True)
    text = to_json(limited) if limited else None
    connection.execute(tenants.update().where(tenants.c.name == tenant).values(quota=text))
    return quota


def is_draining(connection: Connection) -> bool:
    """Return whether the cluster is draining, so that no job starts."""
    return connection.execute(select(meta.c.value).where(meta.c.key == _DRAINING)).scalar() == "yes"


def set_draining(connection: Connection, on: bool) -> None:
    """Set whether the cluster is draining, so that no job starts."""
    connection.execute(meta.delete().where(meta.c.key == _DRAINING))
    if on:
        connection.execute(meta.insert(), {"key": _DRAINING, "value": "yes"})


def _quota(text: str | None) -> Quota | None:
    return None if text is None else Quota(**orjson.loads(text))
