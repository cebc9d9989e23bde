"""The tables of a database, and how an older database is brought up to date."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from palestra.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The tables that a store has, and the steps from each of its older versions to the present one.

    Attributes:
        store: what the store is called in errors, such as `run store`.
        metadata: the tables of the present version.
        migrations: one entry a version: the statements that lead from version i to i + 1. Version 0 is an empty
            database, so the first entry is empty: `metadata` is created in its place.
        read_version: returns the version that a database says it has; 0 where it is empty. It raises StoreError where
            the database is of another program.
        write_version: keeps the version in the database. The run store has it in a pragma, the control store in a row
            of a table, because PostgreSQL has no pragmas.
    """

    store: str
    metadata: sa.MetaData
    migrations: tuple[tuple[str, ...], ...]
    read_version: Callable[[sa.Connection], int]
    write_version: Callable[[sa.Connection, int], None]

    @property
    def version(self) -> int:
        """Return the present version, which is the number of migrations."""
        return len(self.migrations)

    def migrate(self, connection: sa.Connection) -> None:
        """Create the tables, or bring an older database to the present version, in the caller's transaction.

        Raises:
            StoreError: a newer version of Palestra wrote the database, or it is of another program.
        """
        found = self.read_version(connection)
        if found > self.version:
            raise StoreError(
                f"this {self.store} has version {found} and this Palestra reads up to {self.version}; upgrade Palestra"
            )
        if found == 0:
            self.metadata.create_all(connection)
        else:
            for statements in self.migrations[found:]:
                for statement in statements:
                    connection.exec_driver_sql(statement)
        if found != self.version:
            self.write_version(connection, self.version)
