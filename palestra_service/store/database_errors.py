"""Handling of the control store's database errors: one table for PostgreSQL, and one for SQLite."""

from __future__ import annotations

import sqlite3
from enum import Enum

import sqlalchemy as sa

from palestra.errors import StoreError, StoreUnreachable


class Follows(Enum):
    """How to handle a database error.

    Attributes:
        AGAIN: StoreUnreachable; retry on the same connection.
        RECONNECT: StoreUnreachable; retry on a new connection.
        REFUSED: StoreError; an operator must act.
        DEFECT: raise the error itself, a defect of Palestra.
    """

    AGAIN = "again"
    RECONNECT = "reconnect"
    REFUSED = "refused"
    DEFECT = "defect"


# By class (the first two characters of SQLSTATE), and by whole code for what differs from its class. See appendix A of
# PostgreSQL's documentation.
POSTGRES = {
    "00": Follows.DEFECT,  # successful completion
    "01": Follows.DEFECT,  # warning
    "02": Follows.DEFECT,  # no data
    "03": Follows.DEFECT,  # SQL statement not yet complete
    "08": Follows.RECONNECT,  # connection exception
    "09": Follows.DEFECT,  # triggered action exception
    "0A": Follows.REFUSED,  # feature not supported, such as by another program that speaks PostgreSQL's protocol
    "0B": Follows.DEFECT,  # invalid transaction initiation
    "0F": Follows.DEFECT,  # locator exception
    "0L": Follows.REFUSED,  # invalid grantor
    "0P": Follows.REFUSED,  # invalid role specification
    "0Z": Follows.DEFECT,  # diagnostics exception
    "10": Follows.DEFECT,  # XQuery error
    "20": Follows.DEFECT,  # case not found
    "21": Follows.DEFECT,  # cardinality violation
    "22": Follows.DEFECT,  # data exception
    "23": Follows.DEFECT,  # integrity constraint violation
    "24": Follows.DEFECT,  # invalid cursor state
    "25": Follows.DEFECT,  # invalid transaction state
    "25006": Follows.RECONNECT,  # read-only transaction: a new connection may lead to the new primary
    "25P03": Follows.RECONNECT,  # idle in transaction for too long: this process stood still
    "25P04": Follows.RECONNECT,  # transaction timeout
    "26": Follows.RECONNECT,  # invalid statement name: a pooler has exchanged the session
    "27": Follows.DEFECT,  # triggered data change violation
    "28": Follows.RECONNECT,  # invalid authorization: a password that is being changed
    "2B": Follows.DEFECT,  # dependent privilege descriptors still exist
    "2D": Follows.DEFECT,  # invalid transaction termination
    "2F": Follows.DEFECT,  # SQL routine exception
    "34": Follows.DEFECT,  # invalid cursor name
    "38": Follows.DEFECT,  # external routine exception
    "39": Follows.DEFECT,  # external routine invocation exception
    "3B": Follows.DEFECT,  # savepoint exception
    "3D": Follows.RECONNECT,  # there is no such database, perhaps not yet
    "3F": Follows.REFUSED,  # invalid schema name
    "40": Follows.AGAIN,  # rolled back: a deadlock, or a conflict with recovery
    "40003": Follows.RECONNECT,  # statement completion unknown
    "42": Follows.DEFECT,  # syntax error or access rule violation
    "42501": Follows.REFUSED,  # insufficient privilege
    "42P01": Follows.REFUSED,  # undefined table: somebody has dropped it
    "42P05": Follows.RECONNECT,  # duplicate prepared statement: a pooler has exchanged the session
    "44": Follows.DEFECT,  # WITH CHECK OPTION violation
    "53": Follows.AGAIN,  # insufficient resources: disk, memory, connections
    "54": Follows.DEFECT,  # program limit exceeded
    "55": Follows.AGAIN,  # object not in prerequisite state: a lock that is not available, an object in use
    "57": Follows.RECONNECT,  # operator intervention: the server shuts down, starts, or ends sessions
    "57014": Follows.AGAIN,  # query canceled, by its time limit
    "58": Follows.AGAIN,  # system error, such as I/O
    "58P01": Follows.REFUSED,  # undefined file
    "58P02": Follows.REFUSED,  # duplicate file
    "72": Follows.AGAIN,  # snapshot too old
    "F0": Follows.REFUSED,  # configuration file error
    "HV": Follows.DEFECT,  # foreign data wrapper error
    "P0": Follows.REFUSED,  # PL/pgSQL error: somebody has added a trigger
    "XX": Follows.REFUSED,  # internal error: damaged data or index
}

# By primary result code.
SQLITE = {
    sqlite3.SQLITE_BUSY: Follows.AGAIN,
    sqlite3.SQLITE_LOCKED: Follows.AGAIN,
    sqlite3.SQLITE_NOMEM: Follows.AGAIN,
    sqlite3.SQLITE_READONLY: Follows.AGAIN,
    sqlite3.SQLITE_INTERRUPT: Follows.AGAIN,
    sqlite3.SQLITE_IOERR: Follows.AGAIN,
    sqlite3.SQLITE_FULL: Follows.AGAIN,
    sqlite3.SQLITE_CANTOPEN: Follows.AGAIN,
    sqlite3.SQLITE_PROTOCOL: Follows.AGAIN,
    sqlite3.SQLITE_CONSTRAINT: Follows.DEFECT,
    sqlite3.SQLITE_MISMATCH: Follows.DEFECT,
    sqlite3.SQLITE_MISUSE: Follows.DEFECT,
    sqlite3.SQLITE_RANGE: Follows.DEFECT,
}  # all others are REFUSED: a damaged file, a missing right, a table that somebody has dropped


def what_follows(error: BaseException | None) -> Follows:
    """Return how to handle an error of psycopg or `sqlite3`."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:  # raised by Python's module, which has not asked SQLite
            return Follows.DEFECT if isinstance(error, sqlite3.ProgrammingError) else Follows.REFUSED
        return SQLITE.get(code & 0xFF, Follows.REFUSED)
    state: str | None = getattr(error, "sqlstate", None)
    if state is None:  # raised by the client: there is no connection, or a value can't be sent
        return Follows.RECONNECT if _is_connection_error(error) else Follows.DEFECT
    return POSTGRES.get(state, POSTGRES.get(state[:2], Follows.REFUSED))


def in_words(error: Exception) -> Exception:
    """Return the callers' error for a database error: its message without the statement and its values.

    Defects of Palestra, such as a violated constraint, are returned unchanged.
    """
    if not isinstance(error, sa.exc.DBAPIError):
        return error
    said, follows = " ".join(str(error.orig).split()), what_follows(error.orig)
    if follows is Follows.DEFECT:
        return error
    if follows is Follows.REFUSED:
        return StoreError(f"the control store could not be used: {said}")
    return StoreUnreachable(f"the control store can't be used at the moment: {said}")


def drop_connections(engine: sa.Engine) -> None:
    """Make a PostgreSQL engine close a connection after an error with RECONNECT."""

    @sa.event.listens_for(engine, "handle_error")
    def _handle(context: sa.engine.ExceptionContext) -> None:
        if what_follows(context.original_exception) is Follows.RECONNECT:
            context.is_disconnect = True


def _is_connection_error(error: BaseException | None) -> bool:
    """Return whether psycopg raised an error because there is no connection."""
    return any(kind.__name__ in ("OperationalError", "InterfaceError") for kind in type(error).__mro__)
