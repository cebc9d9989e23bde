"""A picture as a policy's model got it: its pixels and tiles."""

from __future__ import annotations

import threading
from dataclasses import replace

from starlette.responses import Response

from palestra.dashboard.runs import Run
from palestra.errors import NotFound
from palestra.http.pictures import file_answer
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.pictures.containers import OF_A_RUN, InvalidPicture
from palestra.pictures.pixels import decode_picture, encode_picture
from palestra.renderers.picture_layout import layout_fact, read_layout
from palestra.store.run_log import read_fact

TILES = "x-palestra-tiles"  # rows and columns of its parts: tiles, or the squares of embeddings
WORDS = "x-palestra-seen"
# Of what is decoded for the page: a run may allow more, in files of a few bytes, and a service shows the runs of all
# tenants from one process. 15 bytes a pixel are needed for a moment, where something is transparent.
LIMITS = replace(OF_A_RUN, max_pixels=1 << 24)
_DECODING = threading.Lock()  # one picture at a time, whosever run it is of


def seen_picture(run: Run, digest: str, policy: str) -> Response:
    """Return a response with the pixels that a model got of a picture, as PNG. Blocks for disk and decoder.

    Raises:
        NotFound: there is no such picture, or the run has not recorded the model's image settings.
        InvalidPicture: too many pixels for the page.
        InvalidRequest: the model does not accept this size.
    """
    with run.open() as connection:
        noted = read_fact(connection, layout_fact(policy))
    if noted is None:
        raise NotFound(f"this run does not say how the model of {policy!r} gets pictures")
    layout = read_layout(noted)
    file = Blobs(run.folder / FOLDER).get(digest)
    with _DECODING:
        image = decode_picture(file, LIMITS)
        wide, high = layout.largest_size(*image.size)
        if wide * high > LIMITS.max_pixels:
            raise InvalidPicture(
                f"for the model the picture is brought to {wide:,} × {high:,} pixels, and the page shows "
                f"{LIMITS.max_pixels:,}"
            )
        seen = encode_picture(layout.seen(image))
    rows, columns = layout.cells(*image.size)
    said = layout.in_words(*image.size).replace("×", "x")
    return file_answer(seen, **{TILES: f"{rows} {columns}", WORDS: said})
