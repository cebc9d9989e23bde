"""The limits of pictures, and the structure of PNG, JPEG, WebP and GIF files, checked without decoding pixels.

A decoder trusts the sizes in a file: it allocates the canvas, or reads all frames to count them. So the whole structure
is checked first. Truncated files are refused, and so are files with data after the picture, which may be another format
at the same time (polyglots).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from palestra.errors import InvalidRequest

MAX_PICTURE_BYTES = 8 << 20  # of the file of a picture in a call


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

    max_bytes: int = MAX_PICTURE_BYTES
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


PNG, JPEG, WEBP, GIF = "image/png", "image/jpeg", "image/webp", "image/gif"
MEDIA_TYPES = (PNG, JPEG, WEBP, GIF)
_MOST_CHUNKS = 10_000  # of any type; ordinary files have fewer than one for each 8 KiB
# What Pillow goes through piece by piece, or joins, in Python: sub-blocks of a GIF's extensions; compressed texts of a
# PNG, each of which may become a megabyte; EXIF segments of a JPEG; and bytes of Photoshop's resources.
_MOST_PIECES, _MOST_TEXTS, _MOST_EXIF, _MOST_RESOURCES = 10_000, 16, 64, 512 << 10
_LEAST_PIECE = 64  # bytes of a GIF's pixels in a sub-block, on average; ordinary ones have 255
_MOST_FILLING = 64 << 10  # bytes between the segments of a JPEG, through which Pillow goes one by one
_PNG_START = b"\x89PNG\r\n\x1a\n"
# In the coded part of a JPEG 0xff is followed by 0 (a byte 0xff), by a restart marker, or by the next segment's marker.
# A marker may have any number of bytes 0xff before it. Only the last of them is looked for: a pattern that takes all of
# them is tried again at each, in time quadratic in their number, and holds up all other threads of the process.
_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)
_JPEG_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # segments that say width and height


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """Type and size of a picture's file.

    Attributes:
        width: in pixels, before an EXIF orientation is applied.
    """

    media_type: str
    width: int
    height: int


def read_container(data: bytes, limits: PictureLimits) -> Container:
    """Return type and size of a picture after checking the structure of its whole file. Raises InvalidPicture: an
    unknown type, too large, animated, truncated, or followed by other data.
    """
    if len(data) > limits.max_bytes:
        raise too_many_bytes(data, limits.max_bytes)
    media_type = media_type_of(data)
    try:
        width, height = _READERS[media_type](data, limits)
    except IndexError:
        raise InvalidPicture(f"the file ({media_type}) is cut off") from None
    if not width or not height:
        raise InvalidPicture("it has no pixels")
    if max(width, height) > limits.max_side or width * height > limits.max_pixels:
        raise InvalidPicture(
            f"it has {width:,} × {height:,} pixels, and a picture may have {limits.max_pixels:,} in all and "
            f"{limits.max_side:,} on a side"
        )
    if max(width, height) > limits.max_ratio * min(width, height):
        raise InvalidPicture(
            f"it has {width:,} × {height:,} pixels, and one side may be at most {limits.max_ratio} times as long as "
            "the other"
        )
    return Container(media_type=media_type, width=width, height=height)


def media_type_of(data: bytes) -> str:
    """Return the media type by the first bytes of the file. Raises InvalidPicture: the type is not accepted."""
    if data.startswith(_PNG_START):
        return PNG
    if data.startswith(b"\xff\xd8\xff"):
        return JPEG
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return WEBP
    if data[:6] in {b"GIF87a", b"GIF89a"}:
        return GIF
    if not data:
        raise InvalidPicture("it has no bytes")
    raise InvalidPicture("its bytes are of no type that is taken, which are PNG, JPEG, WebP and GIF")


def _number(data: bytes, start: int, size: int, order: str) -> int:
    """Return an unsigned number of `size` bytes; raise IndexError if the file ends before."""
    if start + size > len(data):
        raise IndexError
    return int.from_bytes(data[start : start + size], "big" if order == "big" else "little")


def _ends_at(data: bytes, end: int) -> None:
    if end > len(data):
        raise IndexError
    if end < len(data):
        raise InvalidPicture(f"the file continues for {len(data) - end:,} bytes after the picture ends")


def _png(data: bytes, limits: PictureLimits) -> tuple[int, int]:
    """Return width and height of a PNG: chunks of length, type, content and checksum, from IHDR to IEND."""
    if data[12:16] != b"IHDR":
        raise InvalidPicture("the file (image/png) has no header where one has to be")
    size = _number(data, 16, 4, "big"), _number(data, 20, 4, "big")
    place, profiles, texts = len(_PNG_START), 0, 0
    for _ in range(_MOST_CHUNKS):
        length, kind = _number(data, place, 4, "big"), data[place + 4 : place + 8]
        if kind == b"acTL":
            raise InvalidPicture("it is animated; send one frame")
        profiles += kind == b"iCCP"
        if profiles > 1:  # Pillow would decompress all of them
            raise InvalidPicture("the file (image/png) has several colour profiles")
        texts += kind in {b"zTXt", b"iTXt"}
        if texts > _MOST_TEXTS:
            raise InvalidPicture(f"the file (image/png) has more than {_MOST_TEXTS} compressed texts")
        place += length + 12
        if kind == b"IEND":
            _ends_at(data, place)
            return size
    raise InvalidPicture(f"the file (image/png) has more than {_MOST_CHUNKS:,} chunks")


def _jpeg(data: bytes, limits: PictureLimits) -> tuple[int, int]:
    """Return width and height of a JPEG, checking its segments and coded data up to the end."""
    size: tuple[int, int] | None = None
    scans = exifs = resources = 0
    for marker, place in _segments(data):
        if marker == 0xD8:
            raise InvalidPicture("the file (image/jpeg) begins twice")
        if marker in _JPEG_SIZES:
            if size is not None:
                raise InvalidPicture("the file (image/jpeg) states its size twice")
            size = _number(data, place + 5, 2, "big"), _number(data, place + 3, 2, "big")
        exifs += marker == 0xE1 and data.startswith(b"Exif\0", place + 2)
        resources += _number(data, place, 2, "big") if marker == 0xED else 0
        if exifs > _MOST_EXIF or resources > _MOST_RESOURCES:
            raise InvalidPicture(
                f"the file (image/jpeg) has more than {_MOST_EXIF} segments of EXIF, or {_MOST_RESOURCES:,} bytes of "
                "Photoshop's resources"
            )
        if marker == 0xDA:
            scans += 1
            if scans > limits.max_scans:
                raise InvalidPicture(f"the file (image/jpeg) has more than {limits.max_scans} scans")
        if marker == 0xD9 and data[place:].strip(b"\0"):  # some cameras fill their files up with zeros
            _ends_at(data, place)
    if size is None or not scans:
        raise InvalidPicture("the file (image/jpeg) has no pixels")
    return size


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield marker and offset of each segment of a JPEG, up to the last."""
    place, filling, in_scan = 2, 0, False
    for _ in range(_MOST_CHUNKS):
        if (found := _JPEG_MARKER.search(data, place)) is None:
            raise IndexError
        filling += 0 if in_scan else found.start() - place
        if filling > _MOST_FILLING:
            raise InvalidPicture(f"the file (image/jpeg) has {filling:,} bytes between its segments")
        marker, place = found[1][0], found.end()
        yield marker, place
        if marker == 0xD9:
            return
        in_scan = marker == 0xDA
        if marker != 0x01:  # the only other marker without a length
            place += max(_number(data, place, 2, "big"), 2)
    raise InvalidPicture(f"the file (image/jpeg) has more than {_MOST_CHUNKS:,} segments")


def _webp(data: bytes, limits: PictureLimits) -> tuple[int, int]:
    """Return width and height of a WebP: a RIFF file with a chunk VP8, VP8L, or VP8X and further ones."""
    _ends_at(data, _number(data, 4, 4, "little") + 8)
    place, canvas, coded = 12, None, None
    for _ in range(_MOST_CHUNKS):
        if place == len(data):
            if coded is None:
                raise InvalidPicture("the file (image/webp) has no pixels")
            if canvas is not None and canvas != coded:
                raise InvalidPicture("the file (image/webp) states two sizes")
            return coded
        kind, length, body = data[place : place + 4], _number(data, place + 4, 4, "little"), place + 8
        if kind in {b"ANIM", b"ANMF"} or (kind == b"VP8X" and _number(data, body, 1, "little") & 2):
            raise InvalidPicture("it is animated; send one frame")
        if kind in {b"VP8 ", b"VP8L"} and coded is not None:
            raise InvalidPicture("the file (image/webp) has two pictures")
        if kind == b"VP8X":
            canvas = _number(data, body + 4, 3, "little") + 1, _number(data, body + 7, 3, "little") + 1
        elif kind == b"VP8 ":
            coded = _number(data, body + 6, 2, "little") & 0x3FFF, _number(data, body + 8, 2, "little") & 0x3FFF
        elif kind == b"VP8L":
            bits = _number(data, body + 1, 4, "little")
            coded = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        place = body + length + length % 2
        if place > len(data):
            raise IndexError
    raise InvalidPicture(f"the file (image/webp) has more than {_MOST_CHUNKS:,} chunks")


def _gif(data: bytes, limits: PictureLimits) -> tuple[int, int]:
    """Return width and height of a GIF with exactly one frame."""
    width, height = _number(data, 6, 2, "little"), _number(data, 8, 2, "little")
    place = 13 + _colours(data[10])
    pictures, pieces = 0, _MOST_PIECES
    for _ in range(_MOST_CHUNKS):
        kind = data[place]
        if kind == 0x3B:
            if not pictures:
                raise InvalidPicture("the file (image/gif) has no pixels")
            _ends_at(data, place + 1)
            return width, height
        if kind == 0x21:
            place, pieces = _past_blocks(data, place + 2, pieces)
        elif kind == 0x2C:
            pictures += 1
            if pictures > 1:
                raise InvalidPicture("it is animated; send one frame")
            left, top, wide, high = (_number(data, place + 1 + 2 * k, 2, "little") for k in range(4))
            if left + wide > width or top + high > height:
                raise InvalidPicture("the frame of the file (image/gif) is larger than its screen")
            most = _MOST_PIECES + len(data) // _LEAST_PIECE
            place, _ = _past_blocks(data, place + 11 + _colours(data[place + 9]), most)
        else:
            raise InvalidPicture("the file (image/gif) is damaged")
    raise InvalidPicture(f"the file (image/gif) has more than {_MOST_CHUNKS:,} blocks")


def _colours(flags: int) -> int:
    """Return the bytes of a GIF's table of colours, 0 without one."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _past_blocks(data: bytes, place: int, most: int) -> tuple[int, int]:
    """Return the offset after the length-prefixed sub-blocks of a GIF, and the rest of the budget `most`."""
    while length := data[place]:
        place, most = place + length + 1, most - 1
        if most < 0:
            raise InvalidPicture("the file (image/gif) has too many small blocks")
    return place + 1, most


_READERS: dict[str, Callable[[bytes, PictureLimits], tuple[int, int]]] = {
    PNG: _png,
    JPEG: _jpeg,
    WEBP: _webp,
    GIF: _gif,
}
