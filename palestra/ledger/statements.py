"""Statements of the hot path, compiled once and given to the driver: SQLAlchemy takes longer to it than SQLite."""

from __future__ import annotations

import sqlite3
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

T = TypeVar("T")
_DIALECT = sqlite.dialect()
_namedtuple = cast(Any, namedtuple)  # the columns are not known to a type checker


class Prepared:
    """A statement whose values need no conversion for SQLite: text, numbers, bytes and None."""

    def __init__(self, statement: sa.Select[Any] | sa.Insert | sa.Update) -> None:
        """Its `bindparam`s are what it is given by name."""
        compiled = statement.compile(dialect=_DIALECT)
        self._sql, self._names = str(compiled), tuple(compiled.positiontup or ())
        self._fixed = {name: value for name, value in compiled.params.items() if value is not None}
        columns = statement.selected_columns.keys() if isinstance(statement, sa.Select) else []
        self._row: Callable[[tuple[Any, ...]], Any] = _namedtuple("Row", columns, rename=True)._make

    def change(self, connection: sa.Connection, values: Mapping[str, Any]) -> int:
        """Insert or update; returns how many rows it touched."""
        return self._execute(connection, values, lambda cursor: cursor.rowcount)

    def rows(self, connection: sa.Connection, values: Mapping[str, Any]) -> list[Any]:
        """What a select finds; columns are attributes, as in SQLAlchemy's rows."""
        return [self._row(found) for found in self._execute(connection, values, sqlite3.Cursor.fetchall)]

    def row(self, connection: sa.Connection, values: Mapping[str, Any]) -> Any:
        """The first row that a select finds, or None."""
        found = self._execute(connection, values, sqlite3.Cursor.fetchone)
        return None if found is None else self._row(found)

    def _execute(self, connection: sa.Connection, values: Mapping[str, Any], take: Callable[[sqlite3.Cursor], T]) -> T:
        known = {**self._fixed, **values}
        driver = cast(sqlite3.Connection, connection.connection.driver_connection)
        try:
            return take(driver.execute(self._sql, [known[name] for name in self._names]))
        except sqlite3.Error as error:  # as SQLAlchemy raises it, so that nobody has to know both kinds
            kind: type[sa.exc.DBAPIError] = getattr(sa.exc, type(error).__name__, sa.exc.DatabaseError)
            raise kind(self._sql, None, error) from error
