"""`Blobs`: the folder of pictures beside a run's store, each of which is kept once, under the SHA-256 of its bytes."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from palestra.disk import write_whole, writing
from palestra.errors import NotFound, PayloadTooLarge, StoreError

FOLDER = "pictures"  # in the folder of a run
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def digest_of(data: bytes) -> str:
    """Return the name of a picture: the SHA-256 of its encoded bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Return whether a text has the form of a picture's name: 64 hexadecimal digits in lower case."""
    return _DIGEST.fullmatch(text) is not None


class Blobs:
    """A folder of bytes by their digest. Its methods block for the disk, and may be called in any thread.

    Files lie in folders of the digest's first two digits. Several processes may write and read one folder: equal
    content has an equal name, so they can only write the same.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        """Use a folder, which the first `put` makes.

        Args:
            folder: where the files lie.
            max_bytes: the most bytes of all files together; None: any number.
        """
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._used: int | None = None  # bytes of all files; counted at the first `put` that needs it

    def put(self, data: bytes) -> str:
        """Keep a picture, and return its digest when it is on disk. Keeping it again changes nothing.

        Raises:
            PayloadTooLarge: the folder would exceed its `max_bytes`.
            StoreError: the file could not be written.
        """
        digest = digest_of(data)
        path = self.path(digest)
        if self._is_whole(path, len(data)):
            return digest
        # One writer at a time, so that the quota is kept; pictures are small, and most of them are there already.
        with self._lock:
            if self._is_whole(path, len(data)):
                return digest
            replaced = path.stat().st_size if path.exists() else 0  # one that a crash of the machine has damaged
            if self._max_bytes is not None:
                used = self._bytes()
                if used - replaced + len(data) > self._max_bytes:
                    raise PayloadTooLarge(
                        f"the pictures of this run have {used:,} of {self._max_bytes:,} bytes, and this one has "
                        f"{len(data):,} more; raise pictures.store_gib, or delete the run"
                    )
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
            self._sync(path.parent)
            if self._used is not None:
                self._used += len(data) - replaced
        return digest

    def get(self, digest: str) -> bytes:
        """Return the bytes of a picture, after comparing them with its digest.

        Raises:
            NotFound: there is none with this digest, or the text is no digest.
            StoreError: the file does not hold the bytes of its name.
        """
        if not is_digest(digest):
            raise NotFound("a picture is named by the 64 hexadecimal digits of its SHA-256")
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"there is no picture {digest}") from None
        if digest_of(data) != digest:
            raise StoreError(f"{path} does not hold the picture of its name; put it back from a copy, or send it again")
        return data

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, str) and is_digest(digest) and self.path(digest).exists()

    def __iter__(self) -> Iterator[str]:
        """Return the digests of all pictures, in order."""
        if self.folder.is_dir():
            yield from sorted(path.name for path in self.folder.glob("??/*") if is_digest(path.name))

    def path(self, digest: str) -> Path:
        """Return where the file of a digest is, or would be."""
        return self.folder / digest[:2] / digest

    @staticmethod
    def _is_whole(path: Path, size: int) -> bool:
        try:
            return path.stat().st_size == size
        except FileNotFoundError:
            return False

    def _bytes(self) -> int:
        if self._used is None:
            self._used = sum(self.path(digest).stat().st_size for digest in self)
        return self._used

    def _sync(self, folder: Path) -> None:
        """Wait until the names in `folder` and above are on disk, as the content is."""
        for place in (folder, self.folder):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
