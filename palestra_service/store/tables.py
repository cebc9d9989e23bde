"""The tables of the control store, one set for both databases."""

from __future__ import annotations

from dataclasses import asdict

import orjson
import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, String, Table, Text, UniqueConstraint

from palestra.database import Schema, to_json
from palestra.errors import StoreError
from palestra_control.jobs import Bundle, Resources


def resources_text(resources: Resources) -> str:
    """Return resources as a column `resources` holds them."""
    return to_json(asdict(resources))


def stored_resources(text: str) -> Resources:
    """Return the resources that a text of a column `resources` holds."""
    given = orjson.loads(text)
    return Resources(**given | {"bundles": tuple(Bundle(**bundle) for bundle in given["bundles"])})


VERSION_KEY = "control_schema_version"  # of the row of `meta` that has the version
EPOCH_KEY = "epoch"  # of the row of `meta` that counts the control planes that have opened the store

metadata = sa.MetaData()

meta = Table("meta", metadata, Column("key", String, primary_key=True), Column("value", Text, nullable=False))

jobs = Table(
    "jobs",
    metadata,
    # The order of submission. It is not shown to users, because it would tell them how many jobs others submit.
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("job_id", String, nullable=False, unique=True),
    Column("tenant", String, nullable=False),
    Column("user_name", String, nullable=False),
    Column("name", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("priority", String, nullable=False),
    Column("config", Text, nullable=False),  # JSON
    Column("resources", Text, nullable=False),  # JSON
    Column("attached", Boolean, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("starts", Integer, nullable=False),
    Column("restarts_limit", Integer, nullable=False),
    Column("restarts_left", Integer, nullable=False),
    Column("url", Text),
    Column("run_dir", Text),
    Column("node", Text),
    Column("bundle_nodes", Text),  # a JSON list; NULL: it has no bundles, or has not been started
    Column("cancel_requested", Boolean, nullable=False),
    Column("log_tail", Text),
    Column("request_key", String),  # NULL: the client gave none
    Column("request_digest", String, nullable=False),
    Column("from_job", String),  # NULL: it starts from the model of its configuration
    Column("from_step", Integer),  # of the checkpoint; NULL without `from_job`
    Column("time_limit_seconds", Double),  # NULL: any time
    Column("ran_seconds", Double, nullable=False, server_default=sa.text("0")),  # time RUNNING until `changed_at`
    Column("adapters", Integer, nullable=False, server_default=sa.text("0")),  # on a shared base; 0: it asks for none
    Column("base_id", String),  # of the base server on which it ran last; NULL: on none
    UniqueConstraint("tenant", "request_key"),
    Index("jobs_of_tenant", "tenant", "number"),
    Index("jobs_by_state", "state", "number"),
)

bases = Table(  # base servers that have not ended
    "bases",
    metadata,
    Column("base_id", String, primary_key=True),
    Column("model", Text, nullable=False),
    Column("deterministic", Boolean, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("node", String, nullable=False),
    Column("resources", Text, nullable=False),  # JSON
    Column("address", Text),  # NULL: it has never listened
    Column("created_at", Double, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("starts", Integer, nullable=False),
)

allowances = Table(  # what jobs were given of their tenants' budgets; of ended ones, what they have used
    "allowances",
    metadata,
    Column("job_id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("micros", BigInteger, nullable=False),  # millionths of the currency
    Column("ms", BigInteger, nullable=False),  # milliseconds
    Index("allowances_of_tenant", "tenant"),
)

changes = Table(
    "changes",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("number", Integer, primary_key=True),  # 1, 2, … in each tenant
    Column("change_id", String, nullable=False, unique=True),  # so that a commit that was not answered can be repeated
    Column("job_id", String, nullable=False),
    Column("at", Double, nullable=False),
    Column("previous", String),  # NULL: it was submitted
    Column("following", String, nullable=False),
    Column("reason", Text, nullable=False),
    Index("changes_of_job", "job_id", "number"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("quota", Text),  # a JSON object; NULL: none of its own
)

users = Table(
    "users",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("role", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("removed_at", Double),  # NULL: the user was not removed
)

keys = Table(
    "keys",
    metadata,
    Column("key_id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("user_name", String, nullable=False),
    Column("label", String, nullable=False),
    Column("digest", String, nullable=False),  # SHA-256 of the secret, in hex
    Column("limits", Text, nullable=False),  # a JSON object
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),  # NULL: never
    Column("revoked_at", Double),  # NULL: it was not
    Column("last_used_at", Double),  # coarse; NULL: never
    Index("keys_of_user", "tenant", "user_name"),
)

audit = Table(
    "audit",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("number", Integer, primary_key=True),  # 1, 2, … in each tenant
    Column("entry_id", String, nullable=False, unique=True),
    Column("at", Double, nullable=False),
    Column("who", String, nullable=False),
    Column("key_id", String),  # NULL: not by a key
    Column("what", String, nullable=False),
    Column("target", Text, nullable=False),
)


def _read_version(connection: sa.Connection) -> int:
    names = set(sa.inspect(connection).get_table_names())
    if "meta" in names:
        text = connection.execute(sa.select(meta.c.value).where(meta.c.key == VERSION_KEY)).scalar()
        found = int(text) if text is not None else None
    else:
        found = 0 if names.isdisjoint(metadata.tables) else None
    if found is None:
        raise StoreError("this database holds tables of another program; give the control store one of its own")
    return found


def _write_version(connection: sa.Connection, version: int) -> None:
    connection.execute(meta.delete().where(meta.c.key == VERSION_KEY))
    connection.execute(meta.insert(), {"key": VERSION_KEY, "value": str(version)})


SCHEMA = Schema(
    store="control store",
    metadata=metadata,
    read_version=_read_version,
    write_version=_write_version,
)
