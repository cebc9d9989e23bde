"""Pictures are decoded to the pixels that a browser shows, and files that attack are refused soon, without memory."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hostile_pictures import ATTACKS, RED, encoded, gif_extension, jpeg_segments, png, png_chunk
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from palestra.pictures.containers import InvalidPicture, PictureLimits
from palestra.pictures.pixels import decode_picture, encode_picture, upright_size

pytestmark = pytest.mark.ci


def _noise(mode: str = "RGB", size: tuple[int, int] = (37, 23)) -> Image.Image:
    generator = np.random.default_rng(3)
    return Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), np.uint8)).convert(mode)


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("GIF", {}),
        ("JPEG", {"quality": 80}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {"quality": 70}),
        ("WEBP", {"lossless": True}),
    ],
)
def test_the_pixels_are_those_of_pillow_itself(kind, options):
    data = encoded(_noise(), kind, **options)
    found = decode_picture(data)
    assert found.mode == "RGB"
    assert np.array_equal(_pixels(found), _pixels(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(mode):
    data = encoded(_noise(mode), "JPEG" if mode == "CMYK" else "PNG")
    assert decode_picture(data).mode == "RGB"
    assert decode_picture(data).size == (37, 23)


def test_sixteen_bits_of_grey_become_eight():
    grey = Image.fromarray(np.array([[0, 257 * 100, 65535]], np.uint16))
    assert _pixels(decode_picture(encoded(grey)))[0, :, 0].tolist() == [0, 100, 255]


def test_what_is_transparent_lies_on_white():
    image = Image.new("RGBA", (3, 1))
    image.putdata([(255, 0, 0, 0), (255, 0, 0, 255), (0, 0, 0, 128)])
    found = _pixels(decode_picture(encoded(image)))[0].tolist()
    assert found[:2] == [[255, 255, 255], [255, 0, 0]]
    assert found[2] == [127, 127, 127]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_orientation_of_exif_is_applied(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(_noise(), kind, exif=exif)
    assert np.array_equal(
        _pixels(decode_picture(data)), _pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    )


@pytest.mark.parametrize("raw", [b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0", b"Exif\0\0MM\0*" + b"\xff" * 400])
def test_damaged_exif_changes_no_pixel(raw):
    assert np.array_equal(_pixels(decode_picture(encoded(RED, "PNG", exif=raw))), _pixels(RED))


def _exif(*entries: tuple[int, int, int, int], after: int = 0) -> bytes:
    """EXIF data of one directory, little-endian; `after` is where the next one is said to be."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + packed + struct.pack("<I", after)


EXIF_TRICKS = {
    "a directory that follows itself": _exif((0x0112, 3, 1, 1), after=8),
    "a directory within itself": _exif((0x8769, 4, 1, 8), (0x8825, 4, 1, 8), (0xA005, 4, 1, 8)),
    "an orientation that is none": _exif((0x0112, 3, 1, 77)),
    "an orientation of text": _exif((0x0112, 2, 400, 8)),
    "a value of four gigabytes": _exif((0x010E, 2, 0xFFFFFFFF, 8)),
    "a thumbnail beyond the end": _exif((0x0201, 4, 1, 0xFFFFFFF0), (0x0202, 4, 1, 0xFFFFFFF0)),
    "5,000 entries": _exif(*[(0x9C9B, 1, 4, 0)] * 5_000),
}


@pytest.mark.parametrize("name", EXIF_TRICKS)
def test_a_trick_of_exif_changes_no_pixel_and_takes_no_time(name):
    decode_picture(encoded())  # imports
    for kind in ("PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(RED, kind, exif=EXIF_TRICKS[name], **options)
        began = time.process_time()
        pixels = _pixels(decode_picture(data))
        assert time.process_time() - began < 0.1
        assert np.array_equal(pixels, _pixels(RED))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_size_from_the_header_is_that_of_the_pixels(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(_noise(), kind, **({} if kind == "GIF" else {"exif": exif}))
    assert upright_size(data, PictureLimits()) == decode_picture(data).size


def test_ordinary_extensions_texts_and_exif_are_taken():
    for data in (
        gif_extension(0xFF, b"ICCRGBG1012", *[bytes(255)] * 9_000),
        gif_extension(0xFE, *[b"a comment"] * 1_000),
        jpeg_segments(0xE1, b"Exif\0\0" + bytes(60_000), 60),
        jpeg_segments(0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 5_000, 8),
    ):
        began = time.process_time()
        assert decode_picture(data).size == upright_size(data, PictureLimits()) == RED.size
        assert time.process_time() - began < 0.5


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_within_100_ms_and_keeps_no_memory(name):
    make, reason = ATTACKS[name]
    data = make()
    decode_picture(encoded())  # imports
    took = []
    for _ in range(3):  # the machine may be busy with something else
        began = time.perf_counter()
        with pytest.raises(InvalidPicture, match=reason):
            decode_picture(data)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.1
    kept, peaks = zip(*(memory_of_refusal(data) for _ in range(3)), strict=True)
    assert min(kept) < 200_000
    assert min(peaks) < 20_000_000


def memory_of_refusal(data: bytes) -> tuple[int, int]:
    """What stays, and the most, in bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPicture):
            decode_picture(data)
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_a_jpeg_that_is_filled_up_with_zeros_is_taken():
    assert decode_picture(encoded(RED, "JPEG") + bytes(100)).size == RED.size


def test_decoding_ends_when_its_time_is_over():
    data = encoded(_noise(size=(400, 400)))
    with pytest.raises(InvalidPicture, match="took longer"):
        decode_picture(data, PictureLimits(seconds=0))


def test_limits_are_those_that_were_given():
    with pytest.raises(InvalidPicture, match=r"8.*6.*47"):
        decode_picture(encoded(), PictureLimits(max_pixels=47))
    with pytest.raises(InvalidPicture, match="a side"):
        decode_picture(encoded(), PictureLimits(max_side=7))
    with pytest.raises(InvalidPicture, match="bytes"):
        decode_picture(encoded(), PictureLimits(max_bytes=20))


def test_the_crc_of_a_chunk_counts():
    assert decode_picture(png(1, 1, png_chunk(b"IDAT", b"x\x9cc`\0\0\0\x02\0\x01"))).size == (1, 1)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_raises_anything_else(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]))
    whole = bytearray(encoded(_noise(size=(16, 12)), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InvalidPicture):
        assert decode_picture(bytes(whole)).mode == "RGB"


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3)])
def test_an_array_keeps_its_pixels(shape):
    array = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    found = _pixels(decode_picture(encode_picture(array)))
    assert np.array_equal(found, np.broadcast_to(array if shape == (4, 5, 3) else array.reshape(4, 5, 1), (4, 5, 3)))
    assert encode_picture(array) == encode_picture(
        Image.fromarray(array.reshape(4, 5) if shape != (4, 5, 3) else array)
    )


@pytest.mark.parametrize(
    "value", [np.zeros((4, 5)), np.zeros((4, 5, 2), np.uint8), np.zeros((0, 5), np.uint8), "picture.png", 3]
)
def test_other_values_are_no_pictures(value):
    with pytest.raises(TypeError, match="picture"):
        encode_picture(value)
