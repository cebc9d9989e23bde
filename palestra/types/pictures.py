"""Where pictures are found by the digest of their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image


class Pictures(Protocol):
    """Pictures by the SHA-256 of their encoded bytes, in hex; thread-safe."""

    def size(self, digest: str) -> tuple[int, int]:
        """Return width and height of a picture, in pixels.

        Raises:
            PalestraError: no picture has this digest, or it can't be decoded.
        """
        ...

    def image(self, digest: str) -> Image:
        """Return a decoded, upright picture, in RGB.

        Raises:
            PalestraError: see `size`.
        """
        ...
