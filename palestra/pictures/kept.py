"""`KeptPictures`: the folder of a run's pictures, which admits only pictures within the run's limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.pictures.blobs import Blobs, Charge, picture_digest
from palestra.pictures.containers import JPEG, MEDIA_TYPES, OF_A_RUN, InvalidPicture, PictureLimits, read_container
from palestra.pictures.pixels import decode_picture, encode_picture, upright_size

if TYPE_CHECKING:
    from PIL.Image import Image


class KeptPictures(Blobs):
    """`Blobs` that decodes each file once before storing it."""

    def __init__(
        self,
        folder: Path,
        limits: PictureLimits | None = None,
        max_bytes: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the object; arguments as in `Blobs`, and `limits` of each picture (None: `PictureLimits()`)."""
        super().__init__(folder, max_bytes, monotonic)
        self.limits = limits or PictureLimits()

    def keep(self, data: bytes, media_type: str | None = None, charge: Charge | None = None) -> str:
        """Check a file, decode it as a test, store it, and return its digest. Blocks for the disk and the decoder.

        `media_type` is the one given by the sender, if any. Raises InvalidPicture: not an accepted picture, or not of
        the given type. Raises PayloadTooLarge: the folder would exceed `max_bytes`.
        """
        found = read_container(data, self.limits)
        if media_type is not None:
            given = media_type.strip().lower()
            given = JPEG if given == "image/jpg" else given
            if given not in MEDIA_TYPES:
                raise InvalidPicture(f"pictures of the type {given[:40]!r} are not taken; {', '.join(MEDIA_TYPES)} are")
            if given != found.media_type:
                raise InvalidPicture(f"it is sent as {given} and is {found.media_type}")
        # A picture that is there has been decoded before.
        if picture_digest(data) not in self:
            decode_picture(data, self.limits)
        return self.put(data, charge)

    def small_copy(self, digest: str, side: int, charge: Charge | None = None) -> str:
        """Store a copy with at most `side` pixels in width and height, and return its digest; small pictures are
        returned as they are. Raises NotFound, StoreError: see `get`.
        """
        image = decode_picture(self.get(digest), self.limits)
        if max(image.size) <= side:
            return digest
        image.thumbnail((side, side))
        return self.put(encode_picture(image), charge)


_IMAGES = 4  # decoded pictures that are kept: a call's pixels are asked for several times
_SIZES = 65_536


class StoredPictures:
    """Implements `Pictures` for a folder, which other processes can read too."""

    def __init__(self, blobs: Blobs) -> None:
        """Create an empty cache. Every file in `blobs` was decoded once before it was stored."""
        self._blobs, self.folder = blobs, blobs.folder
        self.image = lru_cache(maxsize=_IMAGES)(self._image)
        self.size = lru_cache(maxsize=_SIZES)(self._size)

    def _image(self, digest: str) -> Image:
        return decode_picture(self._blobs.get(digest), OF_A_RUN)

    def _size(self, digest: str) -> tuple[int, int]:
        return upright_size(self._blobs.get(digest), OF_A_RUN)
