"""`Blobs`: the folder of pictures beside a run's store, each of which is kept once, under the SHA-256 of its bytes.

`remove_unused` removes pictures that nothing needs any more. A picture is in use from the moment at which it was put or
renewed, for as long as the caller of `remove_unused` says; the caller has to know which pictures are needed for longer.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from palestra.disk import make_folders, write_whole, writing
from palestra.errors import NotFound, PayloadTooLarge, StoreError

FOLDER = "pictures"  # in the folder of a run
# Counts the bytes that a folder grows by in the block, or raises instead; a block that raises is not counted.
Charge = Callable[[int], AbstractContextManager[None]]
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def picture_digest(data: bytes) -> str:
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

    def __init__(
        self, folder: Path, max_bytes: int | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Use a folder, which the first `put` makes.

        Args:
            max_bytes: the most bytes of all files together; None: any number.
            monotonic: returns seconds, by which it is known how long a picture has not been used.
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
        """Keep a picture, and return its digest when it is on disk. Keeping it again changes nothing.

        Args:
            charge: counts the size of a picture that is new, unless it can't be written; None: nothing does.

        Raises:
            PayloadTooLarge: the folder would exceed its `max_bytes`.
            StoreError: the file could not be written.
            PalestraError: `charge` has refused it.
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
        """Return whether there is a picture of this digest, which is in use from now on as if it had been put."""
        with self._lock:
            if digest not in self:
                return False
            self._used_at[digest] = self._monotonic()
            return True

    def unused(self, seconds: float) -> set[str]:
        """Return the digests of the pictures that nothing of this process has put or renewed for so long."""
        since = self._monotonic() - seconds
        return {digest for digest in self if self._used_at.get(digest, self._opened) < since}

    def remove_unused(self, digests: Collection[str], seconds: float) -> int:
        """Remove those of these pictures that are still unused, and what a crash has left half written.

        No other process may write to the folder meanwhile.

        Args:
            seconds: see `unused`; a picture that was put or renewed since is kept.

        Returns:
            How many pictures were removed.
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
        if picture_digest(data) != digest:
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
