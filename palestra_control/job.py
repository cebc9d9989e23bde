"""One job of a control plane: its state, events, log, files, and data plane."""

from __future__ import annotations

import codecs
import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2

from palestra.client.client import Client
from palestra.errors import ConnectionLost, JobOver, NotFound
from palestra_control.wire import ArtifactView, JobChange, JobKeyView, JobView, ServerView

if TYPE_CHECKING:
    from palestra_control.control import ControlClient

OVER = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event in the life of a job; `kind` is `state`, `step` (with its metrics), `evaluated`, `saved`, …"""

    event_id: str
    kind: str
    data: dict[str, Any]


class Job:
    """A job of a control plane, by its id; every method asks the server.

    Attributes:
        estimate: what it will take, if it was submitted by this object and trains; None: otherwise.
    """

    def __init__(self, control: ControlClient, job_id: str, estimate: str | None = None) -> None:
        self._control, self.job_id, self.estimate = control, job_id, estimate
        # Ids may be pasted from anywhere; quoted, `../keys/ID` can't become the path of another route.
        self._path = f"/jobs/{quote(job_id, safe='')}"

    def view(self) -> JobView:
        """Return the job's present state."""
        return self._view("GET")

    def changes(self) -> list[JobChange]:
        """Return every change of the job's state so far, in order."""
        found: list[JobChange] = self._control.request("GET", f"{self._path}/changes", list[JobChange])
        return found

    def cancel(self) -> JobView:
        """Cancel the job and return its view. A training job first saves the steps that it has trained."""
        return self._view("DELETE")

    def _view(self, method: str) -> JobView:
        view: JobView = self._control.request(method, self._path, JobView)
        return view

    def wait(self) -> JobView:
        """Wait until the job is over, in any of its final states, and return its view."""
        for _ in self.events():
            pass
        return self.view()

    def events(self) -> Iterator[JobEvent]:
        """Iterate over all events from the job's start until it is over; a lost connection is resumed without a gap.

        Raises:
            ConnectionLost: the control plane could not be reached for `retry_seconds`.
        """
        last: str | None = None
        while True:
            headers = {"last-event-id": last} if last else {}
            try:
                with self._control.stream(f"{self._path}/events", headers=headers) as answer:
                    self._control.check(answer)
                    for event in _events(answer.iter_lines()):
                        last = event.event_id
                        yield event
            except (httpx2.RequestError, ConnectionLost):
                self.view()  # waits for the server, and raises if it can't be reached for `retry_seconds`
            else:
                if self.view().state in OVER:
                    return
            time.sleep(0.2 * random.uniform(0.5, 1.0))

    def logs(self, *, follow: bool = False, offset: int = 0) -> Iterator[str]:
        """Iterate over parts of the job's log.

        Args:
            follow: whether to wait for more text until the job is over.
            offset: first byte to read.

        Raises:
            ConnectionLost: the control plane could not be reached for `retry_seconds`.
        """
        params = {"follow": follow, "offset": offset}
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a piece may end within a character
        while True:
            try:
                with self._control.stream(f"{self._path}/logs", params=params) as answer:
                    self._control.check(answer)
                    for chunk in answer.iter_bytes():
                        params["offset"] += len(chunk)
                        if text := decoder.decode(chunk):
                            yield text
                if not follow or self.view().state in OVER:
                    return
            except (httpx2.RequestError, ConnectionLost):
                self.view()  # waits for the server, and raises if it can't be reached for `retry_seconds`
                time.sleep(0.2)

    def server(self) -> ServerView:
        """Return the URL and key of the job's data plane.

        Raises:
            NotFound: the job is not running.
        """
        found: ServerView = self._control.request("GET", f"{self._path}/server", ServerView)
        return found

    def rotate_key(self) -> str:
        """Replace the key of the job's data plane and return it.

        Earlier keys, and those of open episodes, become invalid.

        Raises:
            Forbidden: the job belongs to another user.
            NotFound: the job has no key yet.
        """
        return JobKeyView.model_validate(self._control.request("POST", f"{self._path}/rotate-key")).api_key

    def wait_for_server(self) -> ServerView:
        """Wait until the job runs, and return the URL and key of its data plane.

        A restart of the job may change its URL.

        Raises:
            JobOver: the job is over, so it will not run.
        """
        while True:
            view = self.view()
            if view.state in OVER:
                raise JobOver(f"job {self.job_id} is {view.state}: {view.reason}")
            if view.state == "running":
                with contextlib.suppress(NotFound):  # the job may have ended since `view`
                    return self.server()
            time.sleep(random.uniform(0.5, 1.0))

    def client(self, **more: Any) -> Client:
        """Return a client of the job's data plane; blocks without a limit until the job runs.

        Args:
            **more: arguments of `Client`, such as `worker_id`.

        Raises:
            JobOver: the job is over, so it will not run.
        """
        found = self.wait_for_server()
        return Client(found.url, found.api_key, **more)

    def artifacts(self) -> list[ArtifactView]:
        """Return the files of the job's run, with sizes, for `download`."""
        found: list[ArtifactView] = self._control.request("GET", f"{self._path}/artifacts", list[ArtifactView])
        return found

    def download(self, path: str, to: Path) -> None:
        """Download one file of the job's run, atomically, resuming after a lost connection.

        Args:
            path: path of the file, as `artifacts` lists it.
            to: where to write it; missing folders are created.

        Raises:
            NotFound: the run has no such file.
            ConnectionLost: no byte of it arrived for `retry_seconds`.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_name(f".{to.name}.part")
        try:
            with temporary.open("wb") as file:
                self._fetch(path, _PartialFile(file))
            temporary.replace(to)
        finally:
            temporary.unlink(missing_ok=True)

    def _fetch(self, path: str, part: _PartialFile) -> None:
        most, until = 0, time.monotonic() + self._control.retry_seconds
        while True:
            try:
                with self._control.stream(f"{self._path}/artifacts/{quote(path)}", headers=part.headers) as answer:
                    self._control.check(answer)
                    part.take(answer)
                    return
            except (httpx2.RequestError, ConnectionLost) as error:
                if part.size > most:
                    most, until = part.size, time.monotonic() + self._control.retry_seconds
                elif time.monotonic() > until:
                    raise ConnectionLost(f"{path} can't be fetched: {error}") from error
            time.sleep(0.2 * random.uniform(0.5, 1.0))


class _PartialFile:
    """A file being downloaded: the received bytes, and the version (ETag) of the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._version = file, ""

    @property
    def size(self) -> int:
        return self._file.tell()

    @property
    def headers(self) -> dict[str, str]:
        """Return headers that ask for the rest of the file, or for all of it if the server's version differs by now."""
        rest = {"range": f"bytes={self.size}-", "if-range": self._version} if self.size and self._version else {}
        return {"accept-encoding": "identity", **rest}

    def take(self, answer: httpx2.Response) -> None:
        if answer.status_code != 206:
            self._file.seek(0)
            self._file.truncate()
        self._version = answer.headers.get("etag", "")
        for chunk in answer.iter_bytes():
            self._file.write(chunk)


def _events(lines: Iterator[str]) -> Iterator[JobEvent]:
    """Parse lines of server-sent events. Raises ConnectionLost for lines that are not Palestra's, but a proxy's."""
    found: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        elif "data" in found:
            try:
                event = JobEvent(found["id"], found["event"], dict(json.loads(found["data"])))
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise ConnectionLost(f"what came is no event of Palestra: {found!r:.100}") from error
            yield event
            found = {}
