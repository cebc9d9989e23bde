"""Embeddings of pictures that were computed with weights which have not changed since."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

KEPT_BYTES = 256 * 2**20  # about 1,700 pictures of SmolVLM without tiles, or 100 with 16 of them, in float32


class KeptEmbeddings:
    """The embeddings of pictures by digest, in at most so many bytes; the least recently used is dropped first.

    A copy is empty: it belongs to a model with other weights.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self._by_digest: OrderedDict[str, Tensor] = OrderedDict()

    def __deepcopy__(self, _memo: dict[int, Any]) -> KeptEmbeddings:
        return KeptEmbeddings(self._most)

    def __len__(self) -> int:
        return len(self._by_digest)

    def get(self, digest: str) -> Tensor | None:
        """Return a picture's embeddings, [F, hidden], or None."""
        found = self._by_digest.get(digest)
        if found is not None:
            self._by_digest.move_to_end(digest)
        return found

    def put(self, digest: str, embeddings: Tensor) -> None:
        """Keep a picture's embeddings, [F, hidden]; those that are larger than all that may be kept are not."""
        if digest in self._by_digest or embeddings.nbytes > self._most:
            return
        self._by_digest[digest] = embeddings
        self._bytes += embeddings.nbytes
        while self._bytes > self._most:
            _, dropped = self._by_digest.popitem(last=False)
            self._bytes -= dropped.nbytes

    def clear(self) -> None:
        """Drop all embeddings, because the weights that made them have changed."""
        self._by_digest.clear()
        self._bytes = 0
