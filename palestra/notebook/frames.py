"""Frames of pandas or polars from columns; neither is a dependency, and one is imported when a frame is made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from palestra.errors import InvalidRequest

FrameLibrary = Literal["pandas", "polars"]
LIBRARIES: tuple[FrameLibrary, ...] = ("pandas", "polars")
Columns = Mapping[str, Any]  # by name: lists or arrays of one length; in lists, None where a row has no value


def frame_library(wanted: str | None) -> FrameLibrary:
    """Return the library whose frames are made: the wanted one, or the first that is installed.

    Args:
        wanted: `pandas` or `polars`; None: either.

    Raises:
        InvalidRequest: the wanted library is another one.
        ModuleNotFoundError: the library, or both, are not installed.
    """
    if wanted is not None and wanted not in LIBRARIES:
        raise InvalidRequest(f"frames is {wanted!r}; it is 'pandas' or 'polars'", "frames")
    for name in LIBRARIES:
        if wanted in (None, name) and find_spec(name) is not None:
            return name
    missing = wanted or LIBRARIES[0]
    other = "" if wanted else ", or polars"
    raise ModuleNotFoundError(
        f"a frame needs {missing}, which is not installed: pip install {missing}{other}", name=missing
    )


def frame_of(columns: Columns, library: FrameLibrary) -> Any:
    """Return a frame of a library.

    Args:
        columns: of the frame, in order.
        library: whose frame it is.
    """
    module = import_module(library)
    if library == "polars":
        # Columns of numbers may begin with many rows that have none, from which polars can't guess their type.
        return module.DataFrame(dict(columns), infer_schema_length=None)
    return module.DataFrame(dict(columns))
