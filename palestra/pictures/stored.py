"""A cache of a run's decoded pictures, for its models."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from palestra.pictures.blobs import Blobs
from palestra.pictures.decoding import decode_picture, upright_size
from palestra.pictures.limits import OF_A_RUN

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGES = 4  # decoded pictures that are kept: a call's pixels are asked for several times
_SIZES = 65_536


class StoredPictures:
    """Implements `Pictures` for a folder, which other processes can read too."""

    def __init__(self, blobs: Blobs) -> None:
        """Create an empty cache.

        Args:
            blobs: every file in it was decoded once before it was stored.
        """
        self._blobs, self.folder = blobs, blobs.folder
        self.image = lru_cache(maxsize=_IMAGES)(self._image)
        self.size = lru_cache(maxsize=_SIZES)(self._size)

    def _image(self, digest: str) -> Image:
        return decode_picture(self._blobs.get(digest), OF_A_RUN)

    def _size(self, digest: str) -> tuple[int, int]:
        return upright_size(self._blobs.get(digest), OF_A_RUN)
