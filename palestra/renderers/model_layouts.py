"""The placeholders of the models of two families: Llava 1.5, with as many for every picture, and Qwen, by patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palestra.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE, _PATCH, _BICUBIC = 224, 14, 3  # what transformers' processor and tower take where a model says nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLayout:
    """Llava 1.5: every picture has the same number of placeholders.

    Attributes:
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
    """Return the layout for the settings of Llava's processor, with the defaults of transformers. `whole`: the tower's
    class token is used too.
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


MOST_RATIO = 200  # of the longer side of a picture to the shorter one, in transformers' processor


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchLayout:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures keep their aspect ratio; embeddings have 2D positions.

    Attributes:
        side: of the square of one embedding, in pixels: merged patches times their side.
        least: minimum pixels; smaller pictures are enlarged.
        most: maximum pixels; larger pictures are shrunk.
        resample: Pillow's number of the resize filter.
    """

    side: int
    least: int
    most: int
    image_token: str = "<|image_pad|>"
    resample: int = 3

    @property
    def marker(self) -> str:
        """Return the chat template's text for a picture; see `PictureLayout`."""
        return f"<|vision_start|>{self.image_token}<|vision_end|>"

    def plane(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of a picture's embeddings; see `PictureLayout`."""
        if max(width, height) > MOST_RATIO * min(width, height):
            raise InvalidRequest(
                f"a picture has {width} × {height} pixels, and this model takes none of which one side is more than "
                f"{MOST_RATIO} times as long as the other; cut it, or leave it out",
                "messages",
            )
        side = self.side
        high, wide = (round(length / side) * side for length in (height, width))
        if high * wide > self.most:
            shrink = math.sqrt(height * width / self.most)
            high, wide = (max(side, math.floor(length / shrink / side) * side) for length in (height, width))
        elif high * wide < self.least:
            enlarge = math.sqrt(self.least / (height * width))
            high, wide = (math.ceil(length * enlarge / side) * side for length in (height, width))
        if not high or not wide:
            raise InvalidRequest(
                f"a picture has {width} × {height} pixels, and this model needs more than {side // 2} on each side; "
                "enlarge it, or leave it out",
                "messages",
            )
        return high // side, wide // side

    def text(self, width: int, height: int) -> str:
        """Return the control tokens of a picture; see `PictureLayout`."""
        rows, columns = self.plane(width, height)
        return f"<|vision_start|>{self.image_token * (rows * columns)}<|vision_end|>"

    def cells(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of the embeddings; see `PictureLayout`."""
        return self.plane(width, height)

    def seen_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of what the tower gets; see `PictureLayout`."""
        rows, columns = self.plane(width, height)
        return columns * self.side, rows * self.side

    def largest_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of what the tower gets; see `PictureLayout`."""
        return self.seen_size(width, height)

    def seen(self, image: Image) -> Image:
        """Return the pixels that the tower gets; see `PictureLayout`."""
        return image.resize(self.seen_size(*image.size), self.resample)

    def in_words(self, width: int, height: int) -> str:
        """Return how the model gets a picture; see `PictureLayout`."""
        (wide, high), (rows, columns) = self.seen_size(width, height), self.cells(width, height)
        squares = f"{rows} × {columns} squares of {self.side} × {self.side}"
        return f"as {wide} × {high} pixels, in {squares} with an embedding each"
