"""Which jobs may use a service's base server: a file written by the service and read by the base server.

Each job is a tenant of the base server with its own key, valid from the job's start to its end. The file only has
digests of keys.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from palestra.disk import write_whole
from palestra.errors import StoreError, Unauthorized

PREFIX = "pb-"
FILE = "admissions.json"  # in the folder of a base server


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """One job at a base server.

    Attributes:
        job_id: also its tenant's name there.
        weight: relative share of the trainer's tokens.
    """

    job_id: str
    weight: float
    digest: str


def new_key() -> str:
    """Return a new job key for a base server."""
    return PREFIX + secrets.token_hex(24)


def is_key(text: str) -> bool:
    """Return whether a text has the form of a job key."""
    return re.fullmatch(f"{PREFIX}[0-9a-f]{{48}}", text) is not None


def key_digest(key: str) -> str:
    """Return the digest of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def write_admissions(path: Path, admissions: Iterable[Admission]) -> None:
    """Replace the admissions file with all jobs that may now use the base server."""
    found = {each.job_id: {"weight": each.weight, "digest": each.digest} for each in admissions}
    write_whole(path, json.dumps(found, indent=1, sort_keys=True).encode(), 0o600)


class Admissions:
    """The admissions of a base server, as of the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: dict[str, Admission] = {}
        self._by_digest: dict[str, str] = {}
        self._gone: set[str] = set()
        self.read()

    def read(self) -> None:
        """Read the file again."""
        try:
            found = json.loads(self._path.read_bytes())
            jobs = {name: Admission(job_id=name, **each) for name, each in found.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{self._path}, which says who may use this base server, can't be read: {error}"
            ) from error
        self._gone = (self._gone | self._jobs.keys()) - jobs.keys()
        self._jobs = jobs
        self._by_digest = {each.digest: name for name, each in jobs.items()}

    def take_gone(self) -> set[str]:
        """Return the jobs that are no longer admitted, each once."""
        gone, self._gone = self._gone, set()
        return gone

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each job."""
        return {name: each.weight for name, each in self._jobs.items()}

    def of(self, key: str | None) -> str:
        """Return a key's job, reading the file again if necessary. Raises Unauthorized if no running job has it."""
        # Looked up by digest, so that the time of a comparison says nothing about a key.
        digest = None if key is None else key_digest(key)
        if digest is not None and digest not in self._by_digest:
            self.read()
        job = None if digest is None else self._by_digest.get(digest)
        if job is None:
            raise Unauthorized("the key is missing, or is of no job that runs on this base server")
        return job
