"""The jobs of one base server: their keys, and their shares of the trainer's tokens."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from palestra.disk import write_whole
from palestra.errors import StoreError
from palestra_bases.admissions import FILE, Admission, Admissions, is_key, key_digest, new_key, write_admissions
from palestra_control.jobs import JobRecord
from palestra_service.placement.tenants import Quota

log = logging.getLogger("palestra.control")
KEY_FILE = "base_key"  # in a job's folder, while it runs on a base server


@dataclass(slots=True, eq=False)
class AdmittedJob:
    """A job on a base server.

    Attributes:
        digest: of its key; None: it has none yet.
    """

    job_id: str
    tenant: str
    adapters: int
    digest: str | None = None


class AdmittedJobs:
    """The jobs of one base server, in memory and in the file that the server reads."""

    def __init__(self, folder: Path, jobs: Path) -> None:
        self.folder, self._folders = folder, jobs
        self._jobs: dict[str, AdmittedJob] = {}
        self._gone: set[str] = set()
        self._written: list[Admission] | None = None
        self._has_ended = False
        self._lock = threading.Lock()  # files are written in threads

    @property
    def jobs(self) -> list[AdmittedJob]:
        """Return the jobs."""
        return list(self._jobs.values())

    @property
    def adapters(self) -> int:
        """Return the jobs' total number of adapters."""
        return sum(job.adapters for job in self._jobs.values())

    def add(self, job: JobRecord) -> None:
        """Add a job without a key."""
        self._gone.discard(job.job_id)
        self._jobs[job.job_id] = AdmittedJob(job.job_id, job.tenant, job.adapters)

    def remove(self, job_id: str) -> bool:
        """Remove a job, whose key is valid until `write`; return whether it was here."""
        if self._jobs.pop(job_id, None) is None:
            return False
        self._gone.add(job_id)
        return True

    def give_key(self, job_id: str) -> Path:
        """Write a new key for a job into its folder, and return the file. It is valid after `write`."""
        key, path = new_key(), self._folders / job_id / KEY_FILE
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, key.encode(), 0o600)
        if job_id in self._jobs:
            self._jobs[job_id].digest = key_digest(key)
        return path

    def find_key(self, job: JobRecord) -> None:
        """Add a running job with its existing key."""
        self.add(job)
        path = self._folders / job.job_id / KEY_FILE
        try:
            key = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s can't be read, so its job has no key: %s", path, error)
            return
        if is_key(key):
            self._jobs[job.job_id].digest = key_digest(key)
        else:
            log.warning("%s is damaged, so its job has no key", path)

    def prepare(self) -> None:
        """Create the base server's folder with an admissions file."""
        with self._lock:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                Admissions(self.folder / FILE)
            except StoreError as error:
                if (self.folder / FILE).exists():
                    log.warning("%s", error)
                write_admissions(self.folder / FILE, ())

    def write(self, quotas: Mapping[str, Quota]) -> None:
        """Write changed admissions for the base server, and delete the keys of ended jobs.

        A tenant's jobs share its weight, so that more jobs do not increase its share. The default weight is 1.
        """
        with self._lock:
            jobs = self.jobs
            count = Counter(job.tenant for job in jobs)
            weights = {tenant: quotas.get(tenant, Quota()).weight or 1.0 for tenant in count}
            admissions = [
                Admission(job_id=job.job_id, weight=weights[job.tenant] / count[job.tenant], digest=job.digest)
                for job in jobs
                if job.digest is not None
            ]
            if admissions != self._written and self.folder.is_dir() and not self._has_ended:
                write_admissions(self.folder / FILE, admissions)
                self._written = admissions
            while self._gone:
                (self._folders / self._gone.pop() / KEY_FILE).unlink(missing_ok=True)

    def clear(self) -> None:
        """Revoke all keys, because the base server has ended. Its log stays."""
        with self._lock:
            for job_id in (*self._jobs, *self._gone):
                (self._folders / job_id / KEY_FILE).unlink(missing_ok=True)
            (self.folder / FILE).unlink(missing_ok=True)
            self._has_ended = True
