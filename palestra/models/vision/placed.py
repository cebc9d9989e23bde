"""Which tokens of a sequence are placeholders, and which row of a picture's embeddings each of them stands for."""

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
        positions: int64 [F], of its placeholders in the sequence, in order; the picture has F embeddings, or, where
            the same picture follows itself directly, F is a multiple of that number.
    """

    digest: str
    positions: NDArray[np.int64]


class PictureRows(NamedTuple):
    """Embeddings that replace those of placeholders in a flat batch.

    Attributes:
        rows: int64 [M], rows of the flat batch, each at most once, the lowest first.
        values: [M, hidden], in the order of the rows; wider where layers of the text model add further numbers, see
            `Tower`.
    """

    rows: Tensor
    values: Tensor


def placed_pictures(ids: Ids, media: Sequence[MediaSpan], image_token: int) -> list[PlacedPicture]:
    """Return the pictures of a sequence in order, each with the positions of its placeholders.

    Only tokens in a span stand for a picture: a model may sample the placeholder's id itself, and that is a token like
    any other.

    Args:
        ids: int32 [N].
        media: spans of the ids; parts of one span that were cut apart are joined again.
        image_token: id of a placeholder; a span has other ids as well, such as those between tiles.
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
