"""Encoding of pixels as PNG, without loss."""

from __future__ import annotations

import io
from typing import Any

from palestra.pictures.containers import MEDIA_TYPES


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
