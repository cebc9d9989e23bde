"""Comparisons of algorithms over scenarios and seeds, and matrices of versions that play each other.

Names are imported on first use, so that adding this package's commands loads little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra_lab.matrix.play import play_matrix as play_matrix
    from palestra_lab.matrix.play import versions_of as versions_of
    from palestra_lab.matrix.result import Matrix as Matrix
    from palestra_lab.matrix.result import draw_matrix as draw_matrix

_HOMES = {"Matrix": "result", "draw_matrix": "result", "play_matrix": "play", "versions_of": "play"}
__all__ = ["Matrix", "draw_matrix", "play_matrix", "versions_of"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'palestra_lab' has no attribute {name!r}")
    return getattr(import_module(f"palestra_lab.matrix.{_HOMES[name]}"), name)
