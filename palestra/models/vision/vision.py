"""The part of a model that sees: from a picture's digest to its embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.errors import ModelError
from palestra.models.quiet import NO_PICKLE
from palestra.models.vision.placed import PictureRows, PlacedPicture, Plane, placed_pictures, plane_positions
from palestra.models.vision.processor import PictureProcessor
from palestra.models.vision.towers import Tower, tower_of
from palestra.types.calls import Ids, MediaSpan
from palestra.types.messages import Pictures

KEPT_BYTES = 256 * 2**20  # of embeddings: about 1,700 pictures of SmolVLM without tiles, or 100 with 16, in float32
KEPT_PIXELS_BYTES = 64 * 2**20  # about 21 pictures of SmolVLM without tiles, or 1 with 16, in float32
T = TypeVar("T")


class _KeptByDigest(ABC, Generic[T]):
    """An LRU cache by picture digest, limited in bytes.

    Copying it gives an empty cache, because the copy belongs to another model, which another thread may use.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._by_digest: OrderedDict[str, T] = OrderedDict()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return type(self)(self._most)

    def __len__(self) -> int:
        return len(self._by_digest)

    @abstractmethod
    def bytes_of(self, made: T) -> int:
        """Return how many bytes a picture's part takes."""

    def get(self, digest: str) -> T | None:
        """Return the cached value of a picture, or None."""
        found = self._by_digest.get(digest)
        if found is not None:
            self._by_digest.move_to_end(digest)
        return found

    def put(self, digest: str, made: T) -> None:
        """Cache the value of a picture, unless it is larger than the whole cache."""
        if digest in self._by_digest or self.bytes_of(made) > self._most:
            return
        self._by_digest[digest] = made
        self._bytes += self.bytes_of(made)
        while self._bytes > self._most:
            _, dropped = self._by_digest.popitem(last=False)
            self._bytes -= self.bytes_of(dropped)

    def clear(self) -> None:
        """Drop everything."""
        self._by_digest.clear()
        self._bytes = 0


class KeptEmbeddings(_KeptByDigest[Tensor]):
    """Embeddings of pictures, [F, hidden] each, for unchanged weights."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        super().__init__(most_bytes)

    def bytes_of(self, made: Tensor) -> int:
        """Return the bytes of a picture's embeddings, [F, hidden]."""
        return made.nbytes


class KeptPixels(_KeptByDigest[Mapping[str, Tensor]]):
    """Tower inputs of pictures, [1, …] each by the names of the image processor, for all versions of weights."""

    def __init__(self, most_bytes: int = KEPT_PIXELS_BYTES) -> None:
        super().__init__(most_bytes)

    def bytes_of(self, made: Mapping[str, Tensor]) -> int:
        """Return the bytes of a picture's pixels and masks, [1, …] each."""
        return sum(tensor.nbytes for tensor in made.values())


class Vision:
    """Computes embeddings of pictures, one picture per pass, so that none depends on others.

    Attributes:
        trained: whether the tower's weights may change.
        pictures: source of pictures; None: none can be computed.
        kept: cached embeddings; None: the weights change after every step.
        computed: number of pictures computed by the tower.
    """

    trained = False
    pictures: Pictures | None = None

    def __init__(self, tower: Tower, processor: PictureProcessor) -> None:
        """Take over the tower of a model."""
        self.tower, self.processor = tower, processor
        self.image_token, self.layout = processor.image_token, processor.layout
        self.kept: KeptEmbeddings | None = KeptEmbeddings()
        self._kept_pixels = KeptPixels()
        self.computed = 0

    def owns(self, name: str) -> bool:
        """Return whether a weight is used before the text model."""
        return name.startswith(self.tower.names)

    def embeddings(self, digest: str) -> Tensor:
        """Return the embeddings of a picture, [F, hidden], with a gradient if the tower is trained."""
        known = None if self.kept is None else self.kept.get(digest)
        if known is not None:
            return known
        found = self._of_pixels(self._pixels_of(digest))
        if self.kept is not None:
            self.kept.put(digest, found)
        return found

    def _of_pixels(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings, [F, hidden], for a tower input `pixels`, [1, ...] each."""
        device = next(iter(self.tower.text.parameters())).device
        self.computed += 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trained):
            return self.tower({name: tensor.to(device) for name, tensor in pixels.items()})

    def _pixels_of(self, digest: str) -> Mapping[str, Tensor]:
        """Return the tower's input for a stored picture, [1, ...] each; see `embeddings`."""
        known = self._kept_pixels.get(digest)
        if known is not None:
            return known
        if self.pictures is None:
            raise ModelError(f"picture {digest} can't be found: this model was given no pictures")
        found = self.processor.pixels(self.pictures.image(digest))
        if self.trained:  # a further epoch or version computes the picture again; a frozen tower's embeddings stay
            self._kept_pixels.put(digest, found)
        return found

    def placed(self, ids: Ids, media: Sequence[MediaSpan]) -> list[PlacedPicture]:
        """Return the pictures of a sequence of `ids` [N]; see `placed_pictures`."""
        return placed_pictures(ids, media, self.image_token)

    def positions(self, ids: Ids, media: Sequence[MediaSpan]) -> Tensor:
        """Return the positions of a sequence's tokens `ids` [N]: int64 [N], or [3, N] with 2D picture positions."""
        pictures = [(picture, self._plane(picture.digest)) for picture in self.placed(ids, media)]
        planes = [(picture, Plane(*plane)) for picture, plane in pictures if plane is not None]
        return torch.from_numpy(plane_positions(len(ids), planes)) if planes else torch.arange(len(ids))

    def _plane(self, digest: str) -> tuple[int, int] | None:
        """Return rows and columns of a picture's embeddings; None: 1D positions like text."""
        if self.pictures is None:
            raise ModelError(f"picture {digest} can't be found: this model was given no pictures")
        return self.layout.plane(*self.pictures.size(digest))

    def rows(self, pictures: Sequence[tuple[PlacedPicture, NDArray[np.int64]]]) -> PictureRows | None:
        """Return the embeddings of pictures for the rows of a flat batch; None: the batch has no placeholder.

        Each picture comes with the row [F] of each placeholder, below 0 if it is not in the batch; sequences that share
        a picture may name a row several times.
        """
        found, total = dict[str, tuple[int, Tensor]](), 0
        rows, sources = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        for (digest, positions), at in pictures:
            inside = np.flatnonzero(at >= 0)
            if not len(inside):
                continue
            if digest not in found:
                found[digest] = total, self.embeddings(digest)
                total += len(found[digest][1])
            first, own = found[digest]
            if len(positions) % len(own):
                raise ModelError(f"picture {digest} has {len(own)} embeddings, and {len(positions)} placeholders")
            rows.append(at[inside])
            sources.append(first + inside % len(own))
        if not rows:
            return None
        values = torch.cat([own for _, own in found.values()])
        once, at_first = np.unique(np.concatenate(rows), return_index=True)
        chosen = torch.from_numpy(np.concatenate(sources)[at_first]).to(values.device)
        return PictureRows(torch.from_numpy(once).to(values.device), values.index_select(0, chosen))


def load_vision_model(folder: Path | str, dtype: torch.dtype, attention: str) -> tuple[Any, Vision]:
    """Load a transformers vision-language model and its tower. `folder` may be the name of a model on the hub;
    `attention` is the text model's, and the tower uses torch's.
    """
    from transformers import AutoModelForImageTextToText

    processor = PictureProcessor(folder)
    implementations = {"text_config": attention, "vision_config": "sdpa"}
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation=implementations, **NO_PICKLE
    )
    return model, Vision(tower_of(model), processor)
