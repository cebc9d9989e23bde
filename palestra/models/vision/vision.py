"""The part of a model that sees: from a picture's digest to its embeddings and the positions of its placeholders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.errors import ModelError
from palestra.models.quiet import NO_PICKLE
from palestra.models.vision.processor import PictureProcessor
from palestra.models.vision.towers import Tower, tower_of
from palestra.types.calls import Ids, MediaSpan
from palestra.types.messages import Pictures


class PlacedPicture(NamedTuple):
    """A picture in a sequence.

    Attributes:
        digest: of its bytes.
        positions: int64 [F], of its placeholders, in order. The picture has F embeddings, or a divisor of F if the same
            picture occurs several times in direct succession.
    """

    digest: str
    positions: NDArray[np.int64]


class PictureRows(NamedTuple):
    """Embeddings that replace those of placeholders in a flat batch.

    Attributes:
        rows: int64 [M], rows of the flat batch, ascending and unique.
        values: [M, hidden], in the order of the rows; wider if layers of the text model add further numbers, see
            `Tower`.
    """

    rows: Tensor
    values: Tensor


def placed_pictures(ids: Ids, media: Sequence[MediaSpan], image_token: int) -> list[PlacedPicture]:
    """Return the pictures of a sequence in order, each with the positions of its placeholders.

    Only tokens in a span represent a picture: a model may sample the placeholder's id itself, as an ordinary token.
    `ids` are int32 [N]. Parts of one span that were cut apart are joined again; a span contains other ids too, such as
    separators of tiles.
    """
    joined: list[MediaSpan] = []
    for span in media:
        last = joined[-1] if joined else None
        if last is not None and last.digest == span.digest and last.start + last.tokens == span.start:
            joined[-1] = last._replace(tokens=last.tokens + span.tokens)
        else:
            joined.append(span)
    return [
        PlacedPicture(digest, start + np.flatnonzero(ids[start : start + tokens] == image_token))
        for start, tokens, digest in joined
    ]


AXES = 3  # time, row, column


class Plane(NamedTuple):
    """The grid of a picture's embeddings: `rows` times `columns`, row by row."""

    rows: int
    columns: int


def plane_positions(count: int, pictures: Iterable[tuple[PlacedPicture, Plane]]) -> NDArray[np.int64]:
    """Return the position of each token of a sequence, int64 [3, N]: time, row and column.

    Each text token has three equal numbers, one more than the token before. All placeholders of a picture have the time
    at which the picture begins; rows and columns count from that number. The token after a picture has the picture's
    largest number plus 1, so after a picture of several rows a position is less than the token's index.

    A position depends only on earlier tokens: sequences with a common prefix have equal positions there.
    """
    found = np.empty((AXES, count), np.int64)
    done = position = 0  # tokens that have their positions; position of the token after them
    for (digest, at), (rows, columns) in pictures:
        size = rows * columns
        if len(at) % size:
            raise ModelError(f"picture {digest} has {size} embeddings, and {len(at)} placeholders")
        for own in at.reshape(-1, size):  # several of them where the same picture follows itself
            first, end = int(own[0]), int(own[-1]) + 1
            if end - first != size:
                raise ModelError(f"picture {digest} has {size} placeholders that are not beside one another")
            found[:, done:first] = position + np.arange(first - done)
            position += first - done
            place = np.arange(size)
            found[:, first:end] = position + np.stack((np.zeros_like(place), place // columns, place % columns))
            done, position = end, position + max(rows, columns)
    found[:, done:] = position + np.arange(count - done)
    return found


def joined_positions(parts: Sequence[Tensor]) -> Tensor:
    """Return the positions of a flat batch: int64 [N], or [3, N] if a part has 2D picture positions. `parts` are the
    positions of the sequences, [n] or [3, n] each.
    """
    if all(part.ndim == 1 for part in parts):
        return torch.cat(list(parts))
    return torch.cat([part.expand(AXES, -1) for part in parts], dim=1)


KEPT_BYTES = 256 * 2**20  # of embeddings: about 1,700 pictures of SmolVLM without tiles, or 100 with 16, in float32
KEPT_PIXELS_BYTES = 64 * 2**20  # about 21 pictures of SmolVLM without tiles, or 1 with 16, in float32
T = TypeVar("T")


class _KeptByDigest(ABC, Generic[T]):
    """An LRU cache by picture digest, limited in bytes; its copy is empty, as it belongs to another model."""

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
