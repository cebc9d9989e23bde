"""Where pictures stand among tokens: which are placeholders, and the positions of three numbers (M-RoPE)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.errors import ModelError
from palestra.types.calls import Ids, MediaSpan


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
