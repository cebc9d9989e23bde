"""Three-dimensional positions that arrange a picture's tokens in a plane (M-RoPE; Wang et al. 2024, "Qwen2-VL")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.errors import ModelError
from palestra.models.vision.placed import PlacedPicture

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
    """Return the positions of a flat batch: int64 [N], or [3, N] if a part has 2D picture positions.

    Args:
        parts: positions of the sequences, [n] or [3, n] each.
    """
    if all(part.ndim == 1 for part in parts):
        return torch.cat(list(parts))
    return torch.cat([part.expand(AXES, -1) for part in parts], dim=1)
