"""Statements of hot paths, compiled once and run on the raw driver: SQLAlchemy takes longer than SQLite."""

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
    """A compiled statement whose values need no conversion for SQLite: text, numbers, bytes and None."""

    def __init__(self, statement: sa.Select[Any] | sa.Insert | sa.Update) -> None:
        """Compile a statement. The values of its `bindparam`s are given by name when it is executed."""
        compiled = statement.compile(dialect=_DIALECT)
        self._sql, self._names = str(compiled), tuple(compiled.positiontup or ())
        self._fixed = {name: value for name, value in compiled.params.items() if value is not None}
        columns = statement.selected_columns.keys() if isinstance(statement, sa.Select) else []
        self._row: Callable[[tuple[Any, ...]], Any] = _namedtuple("Row", columns, rename=True)._make

    def change(self, connection: sa.Connection, values: Mapping[str, Any]) -> int:
        """Execute an insert or update, and return how many rows it changed."""
        return self._execute(connection, values, lambda cursor: cursor.rowcount)

    def rows(self, connection: sa.Connection, values: Mapping[str, Any]) -> list[Any]:
        """Execute a select, and return its rows, whose columns are attributes, as in SQLAlchemy."""
        return [self._row(found) for found in self._execute(connection, values, sqlite3.Cursor.fetchall)]

    def row(self, connection: sa.Connection, values: Mapping[str, Any]) -> Any:
        """Execute a select, and return its first row; None: there is none."""
        found = self._execute(connection, values, sqlite3.Cursor.fetchone)
        return None if found is None else self._row(found)

    def _execute(self, connection: sa.Connection, values: Mapping[str, Any], take: Callable[[sqlite3.Cursor], T]) -> T:
        """Execute the statement and return what `take` makes of its cursor.

        Raises:
            sqlalchemy.exc.DBAPIError: SQLite failed; the class has the same name as SQLite's own.
        """
        known = {**self._fixed, **values}
        driver = cast(sqlite3.Connection, connection.connection.driver_connection)
        try:
            return take(driver.execute(self._sql, [known[name] for name in self._names]))
        except sqlite3.Error as error:  # raised as SQLAlchemy's error, so that callers handle one kind of errors
            kind: type[sa.exc.DBAPIError] = getattr(sa.exc, type(error).__name__, sa.exc.DatabaseError)
            raise kind(self._sql, None, error) from error
