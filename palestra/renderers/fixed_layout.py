"""The placeholders of Llava 1.5: the same number for every picture, which is cropped to a square."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palestra.errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE, _PATCH, _BICUBIC = 224, 14, 3  # what transformers' processor and tower take where a model says nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLayout:
    """Llava 1.5: every picture has the same number of placeholders.

    Attributes:
        tokens: placeholders per picture.
        side: of the central square crop, in pixels.
        patch: side of the square of one embedding, in pixels.
        shorter: shorter side of a picture before cropping, in pixels; None: see `stretched`.
        stretched: width and height of every picture instead; None: aspect ratio is kept.
        resample: Pillow's number of the resize filter.
    """

    tokens: int
    side: int = _SIDE
    patch: int = _PATCH
    shorter: int | None = _SIDE
    stretched: tuple[int, int] | None = None
    image_token: str = "<image>"
    resample: int = _BICUBIC

    @property
    def marker(self) -> str:
        """Return `<image>`; see `PictureLayout`."""
        return self.image_token

    def plane(self, width: int, height: int) -> None:
        """Return None: positions are like text's."""
        return

    def text(self, width: int, height: int) -> str:
        """Return the placeholders of a picture of any size."""
        return self.image_token * self.tokens

    def cells(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of the embeddings; see `PictureLayout`."""
        return self.side // self.patch, self.side // self.patch

    def seen_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of what the tower gets; see `PictureLayout`."""
        used = self.side // self.patch * self.patch  # the tower leaves out what is no whole patch, right and below
        return used, used

    def largest_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of a picture before cropping, or of the crop; see `PictureLayout`."""
        return max(self.seen_size(width, height), self._resized(width, height), key=math.prod)

    def seen(self, image: Image) -> Image:
        """Return the pixels that the tower gets; see `PictureLayout`."""
        size = self._resized(*image.size)
        image = image if size == image.size else image.resize(size, self.resample)
        left, top = ((length - self.side) // 2 for length in size)
        wide, high = self.seen_size(*image.size)
        return image.crop((left, top, left + wide, top + high))

    def in_words(self, width: int, height: int) -> str:
        """Return how the model gets a picture; see `PictureLayout`."""
        wide, high = self.seen_size(width, height)
        made, (rows, columns) = self._resized(width, height), self.cells(width, height)
        whole = "" if made == (wide, high) else f" in the middle of {made[0]} × {made[1]}"
        squares = f"{rows} × {columns} squares of {self.patch} × {self.patch}"
        return f"as {wide} × {high} pixels{whole}, in {squares} with an embedding each"

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of a picture before its middle is cut out."""
        if self.stretched is not None:
            return self.stretched
        if self.shorter is None:
            return width, height
        longer = int(self.shorter * max(width, height) / min(width, height))
        return (self.shorter, longer) if width <= height else (longer, self.shorter)


def fixed_layout(images: Mapping[str, Any], vision: Mapping[str, Any], whole: bool) -> FixedLayout:
    """Return the layout for the settings of Llava's processor, with the defaults of transformers.

    Args:
        whole: whether the tower's class token is used too.
    """
    crop, size = images.get("crop_size", _SIDE), images.get("size", _SIDE)
    side = crop["height"] if isinstance(crop, Mapping) else crop
    size = size if isinstance(size, Mapping) else {"shortest_edge": size}
    if set(size) not in ({"shortest_edge"}, {"height", "width"}) or not images.get("do_center_crop", True):
        raise ModelError(f"pictures of Llava that are made {dict(size)}, or not cut to a square, are not supported")
    resizes, patch = images.get("do_resize", True), vision.get("patch_size", _PATCH)
    return FixedLayout(
        tokens=(side // patch) ** 2 + whole,
        side=side,
        patch=patch,
        shorter=size.get("shortest_edge") if resizes else None,
        stretched=(size["width"], size["height"]) if resizes and "width" in size else None,
        resample=images.get("resample", _BICUBIC),
    )
