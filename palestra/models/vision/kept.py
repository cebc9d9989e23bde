"""Caches of picture embeddings, and of the pixels that a tower gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

from torch import Tensor

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
