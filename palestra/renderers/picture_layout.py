"""The placeholders of a picture: the control tokens that a model's processor writes for a given size.

Only a model's files are read, so that writing a prompt needs neither torch nor transformers; tests compare with the
processors of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from palestra.errors import ModelError
from palestra.renderers.model_layouts import FixedLayout, PatchLayout, fixed_layout
from palestra.types.messages import Pictures

if TYPE_CHECKING:
    from PIL.Image import Image

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # values of `model_type` with tokens that have positions in a plane
_LONGEST = 4096  # transformers' bound on a side of a picture before it is cut into tiles


class PictureLayout(Protocol):
    """The placeholders of pictures in a prompt. Methods raise InvalidRequest for a size that is not supported."""

    @property
    def image_token(self) -> str:
        """Return the placeholder, of which there is one for each embedding of the picture."""
        ...

    @property
    def marker(self) -> str:
        """Return the chat template's text for a picture of any size."""
        ...

    def plane(self, width: int, height: int) -> tuple[int, int] | None:
        """Return rows and columns of a picture's embeddings if they have 2D positions.

        None: placeholders have positions like text.
        """
        ...

    def text(self, width: int, height: int) -> str:
        """Return the control tokens of a picture of this size in pixels."""
        ...

    # For those who look at what a model got.

    def cells(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of the tower's input: tiles, or squares of embeddings."""
        ...

    def seen_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the result of `seen` for a picture of this size, in pixels."""
        ...

    def largest_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the largest intermediate picture of `seen`, in pixels."""
        ...

    def seen(self, image: Image) -> Image:
        """Return the tower's input pixels of a picture, before normalisation."""
        ...

    def in_words(self, width: int, height: int) -> str:
        """Describe how the model gets a picture of this size in pixels, to follow "the model got it"."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledLayout:
    """Idefics3 and SmolVLM: rows of tiles with their positions, then the whole picture in one tile.

    Attributes:
        tile: side of a tile in pixels.
        longest: longer side of a picture before splitting, in pixels; None: unchanged.
        splits: whether pictures are split; otherwise each is one tile.
        resample: Pillow's number of the resize filter.
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
        """Return None: positions are like text's."""
        return

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of a picture's tiles; (0, 0): it is not split."""
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

    def cells(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles, at least one; see `PictureLayout`."""
        rows, columns = self.grid(width, height)
        return max(rows, 1), max(columns, 1)

    def seen_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of all tiles together; see `PictureLayout`."""
        rows, columns = self.cells(width, height)
        return columns * self.tile, rows * self.tile

    def largest_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of all tiles together, or of the picture before splitting; see `PictureLayout`."""
        seen = self.seen_size(width, height)
        if self.longest is None:
            return seen
        return max(seen, _bounded(*_stretched(width, height, self.longest), _LONGEST), key=math.prod)

    def seen(self, image: Image) -> Image:
        """Return the tower's tiles, side by side; see `PictureLayout`.

        The additional tile with the whole picture is not included.
        """
        seen = self.seen_size(*image.size)
        if self.longest is not None:
            size = _bounded(*_stretched(*image.size, self.longest), _LONGEST)
            image = image.resize(size, self.resample)
        return image.resize(seen, self.resample)

    def in_words(self, width: int, height: int) -> str:
        """Return how the model gets a picture; see `PictureLayout`."""
        rows, columns = self.grid(width, height)
        if not rows:
            return f"as one tile of {self.tile} × {self.tile} pixels"
        return f"as {rows} × {columns} tiles of {self.tile} × {self.tile} pixels, and the whole in one"

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


def layout_of(config: Mapping[str, Any], files: Mapping[str, bytes]) -> PictureLayout:
    """Return the layout of a model's pictures. `config` is the model's `config.json`, of Idefics3, SmolVLM, Llava or a
    Qwen family; `files` has `preprocessor_config.json` and `processor_config.json`, if they exist.
    """
    vision, processor = config["vision_config"], _read(files, "processor_config.json")
    images = _read(files, "preprocessor_config.json") or processor.get("image_processor") or {}
    if config["model_type"] == "llava":
        return fixed_layout(images, vision, config.get("vision_feature_select_strategy", "default") == "full")
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
    """Return the layout for the settings of Qwen's processor, with the defaults of transformers."""
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
    side = images.get("patch_size", 14) * images.get("merge_size", 2)
    return PatchLayout(side=side, least=least, most=most, resample=images.get("resample", 3))


def _read(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file; one that is not there is empty."""
    return dict(json.loads(files[name])) if name in files else {}


def _stretched(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the size of a picture scaled to the longer side `longest`; the other side is rounded up to even."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return longest, max(short + short % 2, 1)
    short = int(longest * ratio)
    return max(short + short % 2, 1), longest


def _bounded(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the size of a picture with no side longer than `most`."""
    ratio = width / height
    if width >= height and width > most:
        return most, max(int(most / ratio), 1)
    if height > width and height > most:
        return max(int(most * ratio), 1), most
    return width, height


class PictureTokens:
    """Writes the placeholders of pictures.

    Attributes:
        layout: control tokens of a picture of a given size.
    """

    def __init__(self, tokenizer: Any, layout: PictureLayout, pictures: Pictures) -> None:
        self.layout, self._tokenizer, self._pictures = layout, tokenizer, pictures
        # Not `tokenizer.encode`, which sets truncation first, and fails if another thread encodes at that moment.
        self._backend = tokenizer.backend_tokenizer
        self.image_token: int = tokenizer.convert_tokens_to_ids(layout.image_token)
        if self.image_token is None or self.image_token == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {layout.image_token}")
        self._encoded = lru_cache(maxsize=256)(self._encode)

    def ids(self, digest: str) -> tuple[int, ...]:
        """Return the ids of a picture's placeholders, [N]."""
        return self._encoded(self.layout.text(*self._pictures.size(digest)))

    def as_marked(self) -> PictureTokens:
        """Return a writer that writes the chat template's marker for every picture."""
        return _Marked(self._tokenizer, self.layout, self._pictures)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)


class _Marked(PictureTokens):
    """Writes pictures of unknown size, to compare a renderer with a template."""

    def ids(self, digest: str) -> tuple[int, ...]:
        return self._encoded(self.layout.marker)


_TILED = "tiled"
_KINDS: Mapping[str, Any] = {_TILED: TiledLayout, "fixed": FixedLayout, "patches": PatchLayout}
_GAP = 2  # pixels between two tiles
_COLOUR = (255, 0, 255)  # of the gaps: seldom the colour of a picture


def layout_fact(policy: str) -> str:
    """Return the key of the run fact with the layout of a policy's pictures."""
    return f"picture_layout {policy}"


def write_layout(layout: PictureLayout | None) -> str | None:
    """Return a layout as the value of a fact; None: there is no layout, or its kind cannot be restored."""
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
    """Return a picture with gaps between its equal parts. `cells` are rows and columns, from `PictureLayout.cells`."""
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
