"""Pictures of prompts in the form that a vLLM server takes with token ids: the tower's inputs.

The server's own processor is not used, so placeholders and pixels equal the trainer's. Numbers are encoded like vLLM's
`MsgpackEncoder`, from 0.32 on.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec.msgpack
import torch
from torch import Tensor

from palestra.errors import EngineFailure
from palestra.models.vision.processor import PictureProcessor
from palestra.models.vision.vision import KeptPixels, PlacedPicture, placed_pictures
from palestra.types.calls import TokenSequence
from palestra.types.messages import Pictures

_RAW = 3  # type of the extension for the bytes of a tensor
_LEAST = 1e-30  # not 0 in bfloat16 either, and too little to change a sum of anything else


class VllmPictures:
    """Creates the field `features` of requests; thread-safe."""

    def __init__(self, processor: PictureProcessor, pictures: Pictures, *, trained: bool) -> None:
        """Begin without pictures. `trained`: the tower changes with the weights; otherwise the server computes a
        picture once.
        """
        self.processor, self.pictures, self._trained = processor, pictures, trained
        self._kept, self._lock = KeptPixels(), threading.Lock()

    def features(self, prompt: TokenSequence, weights: str) -> dict[str, Any]:
        """Return the pictures of a prompt with their positions. Blocks.

        A split picture is sent tile by tile: the placeholders of one item must be adjacent, and ids that name a tile
        separate two tiles.
        """
        names, places, numbers = list[str](), list[dict[str, int]](), list[str]()
        for picture in placed_pictures(prompt.ids, prompt.media, self.processor.image_token):
            items = [_encoded(item) for item in _items(self._pixels(picture.digest))]
            for number, (start, length) in enumerate(self._runs(picture, len(items))):
                tile = number % len(items)
                names.append(f"{picture.digest}-{tile}{f'-{weights}' if self._trained else ''}")
                places.append({"offset": start, "length": length})
                numbers.append(items[tile])
        return {
            "mm_hashes": {"image": names},
            "mm_placeholders": {"image": places},
            "kwargs_data": {"image": numbers},
        }

    def _runs(self, picture: PlacedPicture, items: int) -> Iterator[tuple[int, int]]:
        """Yield position and number of the placeholders of each item, of a picture that may follow itself."""
        layout = self.processor.layout
        each = layout.text(*self.pictures.size(picture.digest)).count(layout.image_token) // items
        for first in range(0, len(picture.positions), each):
            run = picture.positions[first : first + each]
            if int(run[-1] - run[0]) != each - 1:
                raise EngineFailure(f"the placeholders of picture {picture.digest} do not follow one another")
            yield int(run[0]), each

    def _pixels(self, digest: str) -> Mapping[str, Tensor]:
        """Return the tower's input of a picture, [1, ...] each."""
        with self._lock:
            known = self._kept.get(digest)
        if known is not None:
            return known
        found = self.processor.pixels(self.pictures.image(digest))
        with self._lock:
            self._kept.put(digest, found)
        return found


def _items(pixels: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the items of one picture, of `pixels` [1, ...], each as the family's model in vLLM names its tensors."""
    values = pixels["pixel_values"]
    if "image_grid_thw" in pixels:  # Qwen: patches of all pictures one after another, and their grid
        return [{"pixel_values": _flat(values), "image_grid_thw": _batched(pixels["image_grid_thw"][0], on_cpu=True)}]
    if "pixel_attention_mask" not in pixels:  # Llava
        return [{"pixel_values": _batched(values[0])}]
    one = _batched(torch.tensor(1), on_cpu=True)  # Idefics3: tiles
    return [
        {
            "pixel_values": _flat(_not_padding(values[0, tile : tile + 1])),
            "pixel_attention_mask": _flat(pixels["pixel_attention_mask"][0, tile : tile + 1].bool()),  # from int64
            "num_patches": one,
        }
        for tile in range(values.shape[1])
    ]


def _not_padding(tile: Tensor) -> Tensor:
    """Return a tile [1, 3, H, W] that vLLM does not drop: it drops tiles of zeros as padding."""
    if tile.any():
        return tile
    seen = tile.clone()
    seen.view(-1)[0] = _LEAST
    return seen


def _flat(tensor: Tensor) -> dict[str, Any]:
    """Encode a tensor [n, ...] that is concatenated with those of other items along its first dimension."""
    return {
        "data": _tensor(tensor),
        "field": ["flat", {"slices": [[0, len(tensor), None]], "dim": 0, "keep_on_cpu": False}],
    }


def _batched(tensor: Tensor, *, on_cpu: bool = False) -> dict[str, Any]:
    """Encode a tensor [...] that is stacked to [items, ...] with those of other items."""
    return {"data": _tensor(tensor), "field": ["batched", {"keep_on_cpu": on_cpu}]}


def _tensor(tensor: Tensor) -> list[Any]:
    """Return precision, shape and bytes of a tensor [...]."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), msgspec.msgpack.Ext(_RAW, raw)]


def _encoded(item: dict[str, Any]) -> str:
    """Return an item in base64."""
    return base64.b64encode(msgspec.msgpack.encode(item)).decode("ascii")
