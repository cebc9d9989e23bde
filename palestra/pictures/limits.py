"""The limits of one picture, and the error of a file that does not keep to them."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureLimits:
    """The most that one picture may have; a file with more is refused before its pixels are decoded.

    Attributes:
        max_side: of width and of height, because a narrow strip of few pixels becomes a huge one where it is resized.
        max_ratio: of the longer side to the shorter one. Processors that enlarge a picture until its shorter side is
            as long as their tower needs would make gigabytes of a line: 336 x 2,752,512 pixels of one by 8192.
        max_scans: of a progressive JPEG, each of which is decoded over all pixels.
        seconds: how long the decoding may take. The clock is read whenever the decoder asks for more of the file.
    """

    max_bytes: int = 4 << 20
    max_pixels: int = 4096 * 2304
    max_side: int = 8192
    max_ratio: int = 200
    max_scans: int = 64
    seconds: float = 5.0


class InvalidPicture(InvalidRequest):
    """A file is not an accepted picture: unknown type, damaged, animated or too large.

    The message gives the reason; callers put the position in the conversation before it.
    """


def too_many_bytes(data: bytes, most: int) -> InvalidPicture:
    """Return the error for a file of more than `most` bytes."""
    return InvalidPicture(f"it has {len(data):,} bytes, and a picture may have {most:,}")


# Those in a run's folder were taken already, under limits that may have been others; a busy machine changes nothing.
OF_A_RUN = PictureLimits(max_bytes=1 << 30, max_pixels=1 << 28, max_side=1 << 20, seconds=60.0)
