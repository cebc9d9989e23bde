"""Files of a run: written whole or not at all, and an error of the disk is one line with the path and the cause."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.errors import StoreError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into one line; the OSError stays its cause, by which a service decides what follows.

    Raises:
        StoreError: the file or folder at `path` could not be written.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(
            f"{path} could not be written, because its folder was deleted, moved or replaced; put it back from a copy "
            "and go on with --resume, or start a new run"
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path} could not be written: {error.strerror or error}; what was acknowledged before is kept, so mend "
            "that and go on with --resume"
        ) from error


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file so that it is there whole, or as it was before.

    Args:
        path: of the file.
        content: all of it.
        mode: permissions of a new file, before the umask.

    Raises:
        StoreError: it could not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
