"""The pixels that a model got of a picture, for viewing a run, which records the layout of each policy's pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson

from palestra.renderers.fixed_layout import FixedLayout
from palestra.renderers.patch_layout import PatchLayout
from palestra.renderers.picture_layout import PictureLayout, TiledLayout

if TYPE_CHECKING:
    from PIL.Image import Image

_TILED = "tiled"
_KINDS: Mapping[str, Any] = {_TILED: TiledLayout, "fixed": FixedLayout, "patches": PatchLayout}
_GAP = 2  # pixels between two tiles
_COLOUR = (255, 0, 255)  # of the gaps: seldom the colour of a picture


def layout_fact(policy: str) -> str:
    """Return the key of the run fact with the layout of a policy's pictures."""
    return f"picture_layout {policy}"


def write_layout(layout: PictureLayout | None) -> str | None:
    """Return a layout as the value of a fact; None: there is no layout, or its kind can't be restored."""
    for kind, made in _KINDS.items():
        if isinstance(layout, made):
            return orjson.dumps({"kind": kind, **asdict(layout)}).decode()
    return None


def read_layout(value: str) -> PictureLayout:
    """Return the layout of a fact's value."""
    fields = orjson.loads(value)
    made = _KINDS[fields.pop("kind", _TILED)]  # runs of before noted tiles alone, without their kind
    if isinstance(fields.get("stretched"), list):
        fields["stretched"] = tuple(fields["stretched"])
    return made(**fields)  # type: ignore[no-any-return]


def apart(seen: Image, cells: tuple[int, int]) -> Image:
    """Return a picture with gaps between its equal parts.

    Args:
        seen: from `PictureLayout.seen`.
        cells: rows and columns, from `PictureLayout.cells`.
    """
    from PIL import Image

    rows, columns = cells
    wide, high = seen.width // columns, seen.height // rows
    found = Image.new("RGB", (seen.width + (columns - 1) * _GAP, seen.height + (rows - 1) * _GAP), _COLOUR)
    for row in range(rows):
        for column in range(columns):
            left, top = column * wide, row * high
            part = seen.crop((left, top, left + wide, top + high))
            found.paste(part, (column * (wide + _GAP), row * (high + _GAP)))
    return found
