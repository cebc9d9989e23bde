"""Pixels of pictures: decodes files to RGB with Pillow, within limits, and encodes pixels as PNG, without loss.

Pixels are the ones a browser shows: the EXIF orientation is applied, and transparency becomes white. Colour profiles
are ignored. Decoding blocks for milliseconds, so servers do it in a thread.
"""

from __future__ import annotations

import io
import time
import warnings
from typing import TYPE_CHECKING, Any

from palestra.pictures.containers import (
    GIF,
    JPEG,
    MEDIA_TYPES,
    PNG,
    WEBP,
    InvalidPicture,
    PictureLimits,
    read_container,
)

if TYPE_CHECKING:
    from PIL import Image


_PLUGINS = {PNG: "PNG", JPEG: "JPEG", WEBP: "WEBP", GIF: "GIF"}
_ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
_SIDEWAYS = range(5, 9)  # orientations that exchange width and height
_MOST_EXIF = 64 << 10  # bytes; what JPEG has room for


class _TimedFile(io.BytesIO):
    """A file that refuses reads after a deadline. Pillow reads 64 KiB at a time."""

    def __init__(self, data: bytes, seconds: float) -> None:
        super().__init__(data)
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def read(self, size: int | None = -1, /) -> bytes:
        if time.monotonic() > self._until:
            raise InvalidPicture(f"it took longer than {self._seconds:g} s to decode")
        return super().read(size)


def upright_size(data: bytes, limits: PictureLimits) -> tuple[int, int]:
    """Return width and height of the result of `decode_picture`, from the file's header where possible. Raises
    InvalidPicture, ModuleNotFoundError: see `decode_picture`.
    """
    found = read_container(data, limits)
    if found.media_type == GIF or (found.media_type == PNG and b"eXIf" not in data):
        return found.width, found.height  # without an orientation
    if found.media_type == PNG:  # it may stand after the pixels
        return decode_picture(data, limits).size
    from PIL import Image

    with Image.open(_TimedFile(data, limits.seconds), formats=(_PLUGINS[found.media_type],)) as opened:
        turned = _turn(opened) in _SIDEWAYS
    return (found.height, found.width) if turned else (found.width, found.height)


def decode_picture(data: bytes, limits: PictureLimits | None = None) -> Image.Image:
    """Return the pixels of a picture: an image of Pillow in mode RGB, upright, [height, width, 3] as an array of uint8.

    The same bytes always give the same pixels. The file is PNG, JPEG, WebP or GIF, with one frame. Raises
    InvalidPicture: the file type is not accepted, or the file is damaged, animated or too large.
    """
    limits = limits or PictureLimits()
    found = read_container(data, limits)
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about EXIF data that is damaged, and is not needed
            with Image.open(_TimedFile(data, limits.seconds), formats=(_PLUGINS[found.media_type],)) as opened:
                # A JPEG of several pictures ("MPO") is opened by another plug-in than it was asked for.
                if opened.size != (found.width, found.height) or opened.format != _PLUGINS[found.media_type]:
                    raise InvalidPicture(f"the file ({found.media_type}) has more than one picture")
                opened.load()
                return _on_white(_upright(opened))
    except InvalidPicture:
        raise
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # its own words have an address of memory, and models may be shown them
        raise InvalidPicture(f"the file ({found.media_type}) is damaged where it describes its pixels") from error
    except Exception as error:  # Pillow raises errors of many kinds about files that are damaged
        raise InvalidPicture(f"the file ({found.media_type}) is damaged: {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    """Return the picture in its EXIF orientation; unchanged if the EXIF data are damaged."""
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    turn = turns.get(_turn(image))
    return image if turn is None else image.transpose(turn)


def _turn(image: Image.Image) -> int:
    """Return the EXIF orientation of a picture; 1 (upright) if missing or damaged."""
    from PIL import Image

    exif = Image.Exif()
    raw = image.info.get("exif", b"")
    if raw and len(raw) <= _MOST_EXIF:
        try:
            exif.load(raw)
        except Exception:  # noqa: BLE001 - damaged EXIF data say nothing about the pixels, as in a browser
            return 1
    found = exif.get(_ORIENTATION, 1)
    return found if isinstance(found, int) else 1


def _on_white(image: Image.Image) -> Image.Image:
    """Return the picture in mode RGB: 16 bits become 8, and transparency becomes white."""
    from PIL import Image

    if image.mode.startswith("I"):  # grey with 16 bits, which Pillow would cut off at 255
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    above = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")


def encode_picture(picture: Any) -> bytes:
    """Return a picture as the bytes of a file; equal pixels give equal bytes.

    It is the bytes of a file, which are returned unchanged; an image of Pillow; or an array of uint8, [height, width]
    (grey), [height, width, 1], [height, width, 3] (RGB) or [height, width, 4] (RGBA).
    """
    if isinstance(picture, bytes | bytearray | memoryview):
        return bytes(picture)
    if not hasattr(picture, "save"):
        picture = _image_of(picture)
    elif picture.mode not in {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}:
        picture = picture.convert("RGB")
    file = io.BytesIO()
    picture.info = {}  # no comments, times or colour profiles: the bytes follow from the pixels alone
    picture.save(file, format="PNG")
    return file.getvalue()


def _image_of(array: Any) -> Any:
    shape, kind = getattr(array, "shape", None), str(getattr(array, "dtype", ""))
    if shape is None:
        raise TypeError(
            f"a picture is bytes of a file ({', '.join(MEDIA_TYPES)}), an image of Pillow or an array of uint8, "
            f"and not {type(array).__name__}"
        )
    if len(shape) == 3 and shape[2] == 1:
        array, shape = array[:, :, 0], shape[:2]
    if kind != "uint8" or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in {3, 4})) or 0 in shape:
        raise TypeError(
            f"a picture as an array has uint8 [height, width], or [height, width, 3 or 4], and not {kind} {list(shape)}"
        )
    from PIL import Image

    return Image.fromarray(array)
