"""Files that attack what decodes pictures, and the reason for which each of them is refused."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

from PIL import Image

RED = Image.new("RGB", (8, 6), (200, 30, 30))


def encoded(image: Image.Image = RED, kind: str = "PNG", **options: object) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """Return a PNG of 8-bit grey with these chunks, whatever they are."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def _gif_of_many_frames(frames: int) -> bytes:
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return screen + frame * frames + b";"


def _jpeg_of_many_scans(scans: int) -> bytes:
    whole = encoded(Image.new("L", (2048, 2048)), "JPEG", progressive=True)
    start, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:end] + whole[start:end] * scans + whole[end:]


def _webp_of_size(side: int) -> bytes:
    body = b"\x2f" + struct.pack("<I", (side - 1) | (side - 1) << 14) + bytes(5)
    return b"RIFF" + struct.pack("<I", 4 + 8 + len(body)) + b"WEBP" + b"VP8L" + struct.pack("<I", len(body)) + body


def gif_extension(label: int, *pieces: bytes, times: int = 1) -> bytes:
    """Return a GIF with extensions of these sub-blocks before its picture."""
    whole = encoded(RED, "GIF")
    start = 13 + (3 << ((whole[10] & 7) + 1))
    blocks = b"".join(bytes([len(piece)]) + piece for piece in pieces)
    return whole[:start] + (b"\x21" + bytes([label]) + blocks + b"\0") * times + whole[start:]


def _gif_of_small_pixels(blocks: int) -> bytes:
    whole = encoded(RED, "GIF")
    return whole[:-2] + b"\x01\0" * blocks + b"\0;"


def jpeg_segments(marker: int, body: bytes, count: int) -> bytes:
    """Return a JPEG with equal segments before its picture."""
    whole = encoded(RED, "JPEG")
    return whole[:2] + (b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body) * count + whole[2:]


def _frames(kind: str) -> bytes:
    other = Image.new("RGB", RED.size, (0, 0, 255))
    return encoded(RED, kind, save_all=True, append_images=[other])


# Name: (what makes the file, a part of the reason that has to be given).
ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "no bytes"),
    "svg": (
        lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        "no type that is taken",
    ),
    "html": (lambda: b"<html><script>alert(1)</script></html>", "no type that is taken"),
    "pdf": (lambda: b"%PDF-1.7\n", "no type that is taken"),
    "tiff": (lambda: encoded(RED, "TIFF"), "no type that is taken"),
    "bmp": (lambda: encoded(RED, "BMP"), "no type that is taken"),
    "png bomb": (
        lambda: png(60_000, 60_000, png_chunk(b"IDAT", zlib.compress(bytes(5_000_000)))),
        "60,000 × 60,000 pixels",
    ),
    "narrow png": (lambda: png(4_000_000, 1, png_chunk(b"IDAT", zlib.compress(bytes(4_000_001)))), "on a side"),
    "line": (lambda: encoded(Image.new("L", (1, 8192))), "200 times as long"),
    "webp bomb": (lambda: _webp_of_size(16_384), "16,384 × 16,384 pixels"),
    "text bomb": (
        lambda: png(
            1,
            1,
            png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(60_000_000))),
            png_chunk(b"IDAT", zlib.compress(b"\0\0")),
        ),
        "damaged",
    ),
    "many chunks": (lambda: png(1, 1, *[png_chunk(b"tIME", bytes(7))] * 20_000), "chunks"),
    "png without pixels": (lambda: png(4, 4), "damaged"),
    "png of size 0": (lambda: png(0, 5, png_chunk(b"IDAT", zlib.compress(b""))), "no pixels"),
    "png with a false checksum": (lambda: encoded()[:-20] + b"\0\0\0\0" + encoded()[-16:], "damaged"),
    "10^5 frames": (lambda: _gif_of_many_frames(100_000), "animated"),
    "animated gif": (lambda: _frames("GIF"), "animated"),
    "animated png": (lambda: _frames("PNG"), "animated"),
    "animated webp": (lambda: _frames("WEBP"), "animated"),
    "several jpegs": (lambda: _frames("MPO"), "after the picture ends"),
    "10^4 scans": (lambda: _jpeg_of_many_scans(10_000), "scans"),
    # Each of these once took time in which no other thread could run: hours for the first.
    "fill bytes": (lambda: b"\xff\xd8" + b"\xff" * 1_000_000 + b"\0", "cut off"),
    "fill bytes in a scan": (
        lambda: encoded(RED, "JPEG")[:-2] + (b"\xff" * 100_000 + b"\0") * 10 + b"\xff",
        "cut off",
    ),
    "fill bytes before a segment": (
        lambda: encoded(RED, "JPEG")[:2] + b"\xff" * 1_000_000 + encoded(RED, "JPEG")[2:],
        "between its segments",
    ),
    "1000 colour profiles": (
        lambda: png(1, 1, *[png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1_000_000)))] * 1_000),
        "colour profiles",
    ),
    "10^5 segments": (lambda: b"\xff\xd8" + b"\xff\xe1\0\2" * 100_000, "segments"),
    "10^5 blocks": (lambda: _gif_of_many_frames(0)[:-1] + b"\x21\xff\0" * 100_000 + b";", "blocks"),
    # Small pieces of a file, through which Pillow goes one by one in Python.
    **{
        f"sub-blocks of one byte, extension {label:x}": (
            lambda label=label, first=first: gif_extension(label, *first, *[b"a"] * 1_900_000),
            "small blocks",
        )
        for label, first in {0xFE: [], 0xFF: [b"NETSCAPE2.0"], 0x01: [bytes(12)], 0xF9: [bytes(4)], 0x77: []}.items()
    },
    "many comments of small blocks": (
        lambda: gif_extension(0xFE, *[b"a"] * 100, times=9_000),
        "small blocks",
    ),
    "pixels in sub-blocks of one byte": (lambda: _gif_of_small_pixels(1_900_000), "small blocks"),
    "10^4 segments of EXIF": (lambda: jpeg_segments(0xE1, b"Exif\0\0" + bytes(390), 9_900), "segments of EXIF"),
    "3 * 10^5 resources of Photoshop": (
        lambda: jpeg_segments(0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 5_000, 60),
        "Photoshop's resources",
    ),
    "60 texts of a megabyte": (
        lambda: png(1, 1, *[png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000)))] * 60),
        "compressed texts",
    ),
    "60 international texts of a megabyte": (
        lambda: png(1, 1, *[png_chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(1_000_000)))] * 60),
        "compressed texts",
    ),
    "cut png": (lambda: encoded()[:-9], "cut off"),
    "cut jpeg": (lambda: encoded(RED, "JPEG")[:-30], "cut off"),
    "cut webp": (lambda: encoded(RED, "WEBP")[:-4], "cut off"),
    "cut gif": (lambda: encoded(RED, "GIF")[:-3], "cut off"),
    "png and zip": (lambda: encoded() + b"PK\x03\x04", "after the picture ends"),
    "jpeg and html": (lambda: encoded(RED, "JPEG") + b"<script>alert(1)</script>", "after the picture ends"),
    "gif and javascript": (lambda: encoded(RED, "GIF") + b"=1;alert(1)", "after the picture ends"),
    "webp and php": (lambda: encoded(RED, "WEBP") + b"<?php", "after the picture ends"),
    "frame beyond its screen": (
        lambda: (
            _gif_of_many_frames(1)[: 13 + 6 + 5]
            + struct.pack("<HH", 60_000, 60_000)
            + _gif_of_many_frames(1)[13 + 6 + 9 :]
        ),
        "larger than its screen",
    ),
    "too many bytes": (lambda: encoded() + bytes(9_000_000), "bytes"),
}
