"""The placeholders of Qwen's models: as many as the picture has patches after four of them were merged into one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

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
