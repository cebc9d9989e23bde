"""`Blobs`: the folder of pictures next to a run's store, named by the SHA-256 of their content.

`remove_unused` removes pictures that are not needed any more. A picture counts as used after `put` or `renew` for the
time that the caller of `remove_unused` gives; the caller knows which pictures are needed longer. `KeptPictures` admits
only pictures within the run's limits.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.disk import make_folders, write_whole, writing
from palestra.errors import NotFound, PayloadTooLarge, StoreError
from palestra.pictures.containers import JPEG, MEDIA_TYPES, OF_A_RUN, InvalidPicture, PictureLimits, read_container
from palestra.pictures.pixels import decode_picture, encode_picture, upright_size

if TYPE_CHECKING:
    from PIL.Image import Image


FOLDER = "pictures"  # in the folder of a run
# Counts the bytes that a folder grows by in the block, or raises instead; a block that raises is not counted.
Charge = Callable[[int], AbstractContextManager[None]]
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def picture_digest(data: bytes) -> str:
    """Return the SHA-256 of a picture's encoded bytes, in hex: its name."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Return whether a text is 64 lowercase hexadecimal digits, like a picture's name."""
    return _DIGEST.fullmatch(text) is not None


class Blobs:
    """A folder of files named by digest. Methods block for the disk and are thread-safe.

    Several processes may use one folder: equal content has an equal name. Subfolders are named by the digest's first
    two digits.
    """

    def __init__(
        self, folder: Path, max_bytes: int | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the object; the first `put` creates the folder. All files together have at most `max_bytes`;
        `monotonic` is a clock in seconds, for the time since a picture was last used.
        """
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stored: int | None = None  # bytes of all files; counted at the first `put` that needs it
        self._monotonic, self._opened = monotonic, monotonic()
        self._used_at: dict[
            str, float
        ] = {}  # by digest; the others were used when the folder was opened, at the latest

    def put(self, data: bytes, charge: Charge | None = None) -> str:
        """Store a picture and return its digest when it is on disk; storing it again changes nothing.

        `charge` is called with the size of a new picture that can be written. Raises PayloadTooLarge: the folder would
        exceed `max_bytes`.
        """
        digest = picture_digest(data)
        path = self.path(digest)
        # One writer at a time, so that the quota is kept, and that nothing is removed between the look and the note.
        with self._lock:
            if self._is_whole(path, len(data)):
                self._used_at[digest] = self._monotonic()
                return digest
            replaced = path.stat().st_size if path.exists() else 0  # one that a crash of the machine has damaged
            if self._max_bytes is not None:
                stored = self._bytes()
                if stored - replaced + len(data) > self._max_bytes:
                    raise PayloadTooLarge(
                        f"the pictures of this run have {stored:,} of {self._max_bytes:,} bytes, and this one has "
                        f"{len(data):,} more; raise pictures.store_gib, or delete the run"
                    )
            with nullcontext() if charge is None else charge(len(data)):
                self._write(path, data)
            if self._stored is not None:
                self._stored += len(data) - replaced
            self._used_at[digest] = self._monotonic()
        return digest

    def renew(self, digest: str) -> bool:
        """Return whether the picture exists, and restart its time of use."""
        with self._lock:
            if digest not in self:
                return False
            self._used_at[digest] = self._monotonic()
            return True

    def unused(self, seconds: float) -> set[str]:
        """Return the digests of pictures that this process did not put or renew for so many seconds."""
        since = self._monotonic() - seconds
        return {digest for digest in self if self._used_at.get(digest, self._opened) < since}

    def remove_unused(self, digests: Collection[str], seconds: float) -> int:
        """Remove those of these pictures that are still unused, and partial files of crashes; return how many.

        No other process may write to the folder meanwhile.
        """
        removed = 0
        for digest in sorted(digests):
            with self._lock:  # once for each file, so that those who put pictures wait for one removal at most
                if not self._used_at.get(digest, self._opened) < self._monotonic() - seconds:
                    continue
                path = self.path(digest)
                with writing(path):
                    size = path.stat().st_size if path.exists() else 0
                    path.unlink(missing_ok=True)
                self._used_at.pop(digest, None)
                if self._stored is not None:
                    self._stored -= size
                removed += 1
        with self._lock:  # while there is no writer, a file with such a name was left by a crash
            for path in self.folder.glob("??/.*"):
                path.unlink(missing_ok=True)
        return removed

    def get(self, digest: str) -> bytes:
        """Return the bytes of a picture after checking them against its digest. Raises NotFound: the digest is unknown
        or malformed.
        """
        if not is_digest(digest):
            raise NotFound("a picture is named by the 64 hexadecimal digits of its SHA-256")
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"there is no picture {digest}") from None
        if picture_digest(data) != digest:
            raise StoreError(f"{path} does not hold the picture of its name; put it back from a copy, or send it again")
        return data

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, str) and is_digest(digest) and self.path(digest).exists()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the digests of all pictures, in order."""
        if self.folder.is_dir():
            yield from sorted(path.name for path in self.folder.glob("??/*") if is_digest(path.name))

    def path(self, digest: str) -> Path:
        """Return the path of a digest's file, whether or not it exists."""
        return self.folder / digest[:2] / digest

    @staticmethod
    def _is_whole(path: Path, size: int) -> bool:
        try:
            return path.stat().st_size == size
        except FileNotFoundError:
            return False

    def _bytes(self) -> int:
        if self._stored is None:
            self._stored = sum(self.path(digest).stat().st_size for digest in self)
        return self._stored

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file, and wait until its name is on disk as its content is."""
        with writing(path):
            make_folders(path.parent)
        try:
            write_whole(path, data)
        except StoreError:
            self._stored = None  # counted again, because a damaged file may have been replaced
            with contextlib.suppress(OSError):
                path.unlink()
            raise


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
