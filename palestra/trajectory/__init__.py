"""From recorded calls to the token rows that a trainer takes."""

from palestra.trajectory.rows import TokenRow, rows_of

__all__ = ["TokenRow", "rows_of"]
