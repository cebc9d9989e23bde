"""Maps placeholders in a sequence to rows of a picture's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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

    Args:
        ids: int32 [N].
        media: spans of the ids; parts of one span that were cut apart are joined again.
        image_token: id of a placeholder; a span contains other ids too, such as separators of tiles.
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
