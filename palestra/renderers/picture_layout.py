"""The placeholders of a picture: which control tokens a model's processor writes for one of a given size.

Read from a model's files alone, so that neither torch nor transformers is needed to write a prompt; tests compare with
the processors of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from palestra.errors import ModelError
from palestra.renderers.patch_layout import PatchLayout

if TYPE_CHECKING:
    from PIL.Image import Image

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # values of `model_type` with tokens that have positions in a plane
_LONGEST = 4096  # transformers' bound on a side of a picture before it is cut into tiles


class PictureLayout(Protocol):
    """What stands in a prompt for a picture."""

    @property
    def image_token(self) -> str:
        """Return the placeholder: each stands for one embedding of the picture."""
        ...

    @property
    def marker(self) -> str:
        """Return what the chat template of the model writes for a picture of any size."""
        ...

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of the tiles into which a picture is cut; (0, 0): it is not cut."""
        ...

    def plane(self, width: int, height: int) -> tuple[int, int] | None:
        """Return rows and columns of a picture's embeddings, where each has its position in the plane.

        None: placeholders have positions as text has, one after another.

        Raises:
            InvalidRequest: the model takes no pictures of this size.
        """
        ...

    def text(self, width: int, height: int) -> str:
        """Return the control tokens that stand for a picture of this size in pixels.

        Raises:
            InvalidRequest: the model takes no pictures of this size.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledLayout:
    """Idefics3 and SmolVLM: rows of tiles, each with its place, then the whole picture, in one tile.

    Attributes:
        tokens: placeholders of a tile.
        tile: side of a tile in pixels.
        longest: the longer side of a picture before it is cut, in pixels; None: as it is.
        splits: whether pictures are cut; otherwise each is one tile.
        resample: Pillow's number of the filter by which sizes are changed.
    """

    tokens: int
    tile: int
    longest: int | None
    splits: bool
    image_token: str = "<image>"
    resample: int = 1

    @property
    def marker(self) -> str:
        """Return `<image>`; see `PictureLayout`."""
        return self.image_token

    def plane(self, width: int, height: int) -> None:
        """Return None: positions are those of text."""
        return

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles; see `PictureLayout`."""
        if not self.splits:
            return 0, 0
        if self.longest is not None:
            width, height = _bounded(*_stretched(width, height, self.longest), _LONGEST)
        ratio, tile = width / height, self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        if height <= tile and width <= tile:
            return 0, 0
        return height // tile, width // tile

    def seen(self, image: Image) -> Image:
        """Return the pixels that the tower gets of a picture, before they are normalised: its tiles, side by side.

        The whole picture in one tile, which the tower gets as well where there are several, is not part of it.

        Args:
            image: decoded and upright, in mode RGB.
        """
        rows, columns = self.grid(*image.size)
        if self.longest is not None:
            size = _bounded(*_stretched(*image.size, self.longest), _LONGEST)
            image = image.resize(size, self.resample)
        return image.resize((max(columns, 1) * self.tile, max(rows, 1) * self.tile), self.resample)

    def text(self, width: int, height: int) -> str:
        """Return the control tokens of a picture; see `PictureLayout`."""
        rows, columns = self.grid(width, height)
        images, around = self.image_token * self.tokens, "<fake_token_around_image>"
        tiles = "".join(
            "".join(f"{around}<row_{row}_col_{column}>{images}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        newline = "\n" if rows else ""
        return f"{tiles}{newline}{around}<global-img>{images}{around}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLayout:
    """Llava 1.5: every picture has the same number of placeholders."""

    tokens: int
    image_token: str = "<image>"

    @property
    def marker(self) -> str:
        """Return `<image>`; see `PictureLayout`."""
        return self.image_token

    def plane(self, width: int, height: int) -> None:
        """Return None: positions are those of text."""
        return

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (0, 0): pictures are not cut."""
        return 0, 0

    def text(self, width: int, height: int) -> str:
        """Return the placeholders of a picture; `width` and `height` are not needed."""
        return self.image_token * self.tokens


def layout_of(config: Mapping[str, Any], files: Mapping[str, bytes]) -> PictureLayout:
    """Return the layout of a model's pictures.

    Args:
        config: the model's `config.json`, of Idefics3, SmolVLM, Llava or one of Qwen's families.
        files: contents of `preprocessor_config.json` and `processor_config.json`, those that there are.

    Raises:
        ModelError: the processor is set up in a way that is not supported.
    """
    vision, processor = config["vision_config"], _read(files, "processor_config.json")
    images = _read(files, "preprocessor_config.json") or processor.get("image_processor") or {}
    if config["model_type"] == "llava":
        size = images.get("crop_size", 224)
        side = size["height"] if isinstance(size, Mapping) else size
        whole = config.get("vision_feature_select_strategy", "default") == "full"  # with the token of the class
        return FixedLayout(tokens=(side // vision.get("patch_size", 14)) ** 2 + whole)
    if config["model_type"] in QWEN:
        return _patches(images)
    patches = vision.get("image_size", 224) // vision.get("patch_size", 32)
    size, splits = images.get("size", {"longest_edge": 4 * 364}), images.get("do_image_splitting", True)
    if splits and "longest_edge" not in size:
        raise ModelError(f"pictures that are cut into tiles after they were made {size} are not supported")
    return TiledLayout(
        tokens=patches**2 // config.get("scale_factor", 2) ** 2,
        tile=images.get("max_image_size", {"longest_edge": 364})["longest_edge"],
        longest=size.get("longest_edge") if images.get("do_resize", True) else None,
        splits=splits,
        resample=images.get("resample", 1),
    )


def _patches(images: Mapping[str, Any]) -> PatchLayout:
    """Return the layout of Qwen's processor with these settings; what they leave out is as in transformers."""
    if not images.get("do_resize", True):
        raise ModelError("pictures that are cut into patches as they are, without `do_resize`, are not supported")
    size = images.get("size") or {}
    least, most = (
        images.get(pixels) or size.get(edge) or size.get(pixels) or default
        for pixels, edge, default in (
            ("min_pixels", "shortest_edge", 56 * 56),
            ("max_pixels", "longest_edge", 28 * 28 * 1280),
        )
    )
    return PatchLayout(side=images.get("patch_size", 14) * images.get("merge_size", 2), least=least, most=most)


def _read(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file; one that is not there is empty."""
    return dict(json.loads(files[name])) if name in files else {}


def _stretched(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the size of a picture whose longer side is made `longest`; the other side is rounded up to even."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return longest, max(short + short % 2, 1)
    short = int(longest * ratio)
    return max(short + short % 2, 1), longest


def _bounded(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the size of a picture of which no side may be longer than `most`."""
    ratio = width / height
    if width >= height and width > most:
        return most, max(int(most / ratio), 1)
    if height > width and height > most:
        return max(int(most * ratio), 1), most
    return width, height
