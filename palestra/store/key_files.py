"""A run's key files: `secret`, from which keys are derived, and `api_key`, for people."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.disk import open_own, read_own, write_whole, writing
from palestra.errors import ConfigError, Conflict, NotFound, StoreError

log = logging.getLogger("palestra")
SECRET, API_KEY = "secret", "api_key"
ROTATING = ".rotating"  # is there while the two may not fit each other, because one of them has not been replaced yet
LOCK = ".keys"
SECRET_BYTES = 32
LOOK_SECONDS = 0.01  # how long a look at the secret's file is good for requests
NO_KEY = "the job's data plane has no key yet; it gets one when it starts"
_FORM = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}", re.ASCII)


class SecretFile:
    """A run's secret while its job runs. After `rotate_keys` has returned, every request is checked
    with the new one.
    """

    def __init__(self, folder: Path) -> None:
        """Read the secret, and create one first if the run has none."""
        self._folder, self._path = folder, folder / SECRET
        if not self._path.exists():
            write_private(self._path, secrets.token_hex(SECRET_BYTES))
        self._seen: tuple[int, int, int] | None = None  # inode, modification time and size of the file
        self._secret = read_secret(folder)
        self._look_again_at = 0.0  # monotonic seconds

    def current(self) -> bytes:
        """Return the secret, read again if the file has changed; the last good one if the file is
        missing or damaged.
        """
        try:
            status = os.stat(self._path)
        except OSError:
            return self._secret
        seen = status.st_ino, status.st_mtime_ns, status.st_size
        if seen != self._seen:
            self._seen = seen
            try:
                self._secret = read_secret(self._folder)
            except (ConfigError, OSError) as error:
                log.error("the keys of before stay good: %s", error)
        return self._secret

    def recent(self) -> bytes:
        """Return the secret that `current` returned within the last `LOOK_SECONDS`, or now; a rotation waits for that
        time.
        """
        # A look at the file lets other threads run, and a busy server waits longer for its turn than for the file.
        now = time.monotonic()
        if now >= self._look_again_at:
            self._look_again_at = now + LOOK_SECONDS
            return self.current()
        return self._secret


def read_secret(folder: Path) -> bytes:
    """Return the secret from which a run's keys are derived."""
    path = folder / SECRET
    text = read_own(path).decode(errors="replace").strip()
    if _FORM.fullmatch(text) is None:
        raise ConfigError(
            f"{path} holds {len(text)} characters and not the {2 * SECRET_BYTES} hexadecimal digits of a secret; "
            "delete it, and the run gets a new one (the keys of before open nothing then)"
        )
    return bytes.fromhex(text)


def rotate_keys(folder: Path, job: str) -> str:
    """Replace a run's secret, and return its new key when a running job uses both.

    The old key and those of all claimed episodes become invalid. If the process is killed between writing the two
    files, the next start of the job or the next rotation repairs them.

    Raises:
        NotFound: the run has no keys yet.
        Conflict: the key comes from the variable PALESTRA_API_KEY, and can only be changed there.
    """
    with _locked(folder):
        try:
            present = (folder / API_KEY).read_text(encoding="utf-8").strip()
            derived = job_key(read_secret(folder), job)
        except FileNotFoundError:
            raise NotFound(NO_KEY) from None
        # A key that was given does not fit the secret. Nor does one whose rotation was killed; that one was derived.
        if present != derived and not (folder / ROTATING).exists():
            raise Conflict(
                "the key of this run is what PALESTRA_API_KEY held at its start; start it again with another one"
            )
        fresh = secrets.token_hex(SECRET_BYTES)
        key = job_key(bytes.fromhex(fresh), job)
        write_private(folder / ROTATING, "")
        write_private(folder / SECRET, fresh)  # first, so that the old key is void even if the second write fails
        _write_key(folder, key)
        time.sleep(LOOK_SECONDS)  # from here on the job's process has looked again
        return key


def publish_key(folder: Path, key: Callable[[], str]) -> None:
    """Write a job's key for people and workers of this machine. `key`: returns the current key, called while no other
    process is rotating it.
    """
    with _locked(folder):
        _write_key(folder, key())


def _write_key(folder: Path, key: str) -> None:
    """Write the key, derived from the secret or given; requires the folder's lock."""
    write_private(folder / API_KEY, key)
    with writing(folder / ROTATING):
        (folder / ROTATING).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a run's keys against other writers, but not its job. Raises NotFound: there is no such folder."""
    try:
        with writing(folder):
            descriptor = open_own(folder / LOCK, os.O_RDWR | os.O_CREAT)  # the job holds a lock of the folder itself
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise NotFound(NO_KEY) from None
        raise
    try:
        with writing(folder):
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the descriptor is closed
        yield
    finally:
        os.close(descriptor)


def job_key(secret: bytes, job: str) -> str:
    """Return the key of a job, derived from its run's secret and its name."""
    return "pj-" + sign(secret, job, "job")


def seat_key(secret: bytes, job: str, role: str) -> str:
    """Return the key that claims one player slot of a job's episodes, and nothing else."""
    return "pr-" + sign(secret, job, "seat", role)


def sign(secret: bytes, job: str, *parts: str) -> str:
    """Return 160 bits of HMAC-SHA-256 as hexadecimal digits, which only the owner of the secret can compute. `parts`:
    identify the key's purpose; separated by NUL, which no part contains.
    """
    message = "\0".join((job, *parts)).encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()[:40]


def write_private(path: Path, text: str) -> None:
    """Write a file atomically that only its owner can read, without a final line feed, so that scripts can use its
    content as a header.
    """
    write_whole(path, text.encode(), 0o600)
