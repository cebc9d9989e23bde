"""What a model got of a picture, for those who look at a run: a run notes the layout of each policy's pictures.

Noted are layouts with tiles. How much Llava's processor leaves out at the edges of a picture is not known here.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson

from palestra.renderers.picture_layout import PictureLayout, TiledLayout

if TYPE_CHECKING:
    from PIL.Image import Image

_GAP = 2  # pixels between two tiles
_COLOUR = (255, 0, 255)  # of the gaps: seldom the colour of a picture


def layout_fact(policy: str) -> str:
    """Return the name of the fact of a run that has the layout of a policy's pictures."""
    return f"picture_layout {policy}"


def write_layout(layout: PictureLayout | None) -> str | None:
    """Return a layout as the value of a fact; None: it has no tiles, or there is no layout."""
    return orjson.dumps(asdict(layout)).decode() if isinstance(layout, TiledLayout) else None


def read_layout(value: str) -> TiledLayout:
    """Return the layout of a fact's value."""
    return TiledLayout(**orjson.loads(value))


def apart(seen: Image, tile: int) -> Image:
    """Return a picture of tiles with gaps between them; every pixel of every tile is there.

    Args:
        seen: of `TiledLayout.seen`.
        tile: side of a tile in pixels.
    """
    from PIL import Image

    columns, rows = seen.width // tile, seen.height // tile
    found = Image.new("RGB", (seen.width + (columns - 1) * _GAP, seen.height + (rows - 1) * _GAP), _COLOUR)
    for row in range(rows):
        for column in range(columns):
            corner = column * tile, row * tile
            part = seen.crop((*corner, corner[0] + tile, corner[1] + tile))
            found.paste(part, (column * (tile + _GAP), row * (tile + _GAP)))
    return found


def in_words(layout: TiledLayout, width: int, height: int) -> str:
    """Return how a model gets a picture of this size in pixels."""
    rows, columns = layout.grid(width, height)
    if not rows:
        return f"as one tile of {layout.tile} × {layout.tile} pixels"
    return f"as {rows} × {columns} tiles of {layout.tile} × {layout.tile} pixels, and the whole in one"
