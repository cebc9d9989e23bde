"""The client of a control plane: submit jobs from a laptop, watch them, get what they made."""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import httpx2

from palestra.client.client import Client
from palestra.client.exchange import problem_of
from palestra.errors import ConfigError, ConnectionLost, JobOver, NotFound
from palestra.schemas.control_wire import (
    ArtifactView,
    ChangeView,
    JobKeyView,
    JobList,
    JobView,
    ResourcesBody,
    ServerView,
)

log = logging.getLogger("palestra.control")
OVER = ("completed", "failed", "cancelled")
PAUSE_SECONDS = 5.0  # the longest between two tries
RETRIED = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened in a job: `state`, `step` (with its metrics), `evaluated`, `saved`, …"""

    event_id: str
    kind: str
    data: dict[str, Any]


class ControlClient:
    """Talks to `palestra serve`. Every call is safe to send again, and is, for up to `retry_seconds`."""

    def __init__(self, url: str | None = None, key: str | None = None, *, retry_seconds: float = 60.0) -> None:
        """`url` and `key`: None: the variables PALESTRA_URL and PALESTRA_KEY.

        Raises:
            ConfigError: no URL, or what can't be one or a key.
        """
        url = url or os.environ.get("PALESTRA_URL")
        if not url:
            raise ConfigError("no control plane: give its URL, or set the variable PALESTRA_URL")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL of a control plane; it begins with http:// or https://")
        key = key or os.environ.get("PALESTRA_KEY", "")
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("the key has characters that no key has; copy it anew into PALESTRA_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url, self.retry_seconds = url.rstrip("/"), retry_seconds
        try:
            self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=httpx2.Timeout(30.0, read=60.0))
        except httpx2.InvalidURL as error:
            raise ConfigError(f"{url!r} is no URL of a control plane: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        kind: str | None = None,
        from_job: str | None = None,
        from_step: int | None = None,
        name: str | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        memory_gib: float = 0.0,
        priority: str = "normal",
        private: bool | None = None,
        attached: bool = False,
        restarts: int = 3,
    ) -> Job:
        """Submit a job: one that trains a model, or one that serves it.

        Args:
            config: a JobConfig as a mapping, such as `JobConfig.model_dump(mode="json", exclude_none=True)`. None: that
                of `from_job`, to be served unless `kind` says otherwise.
            kind: `training` or `inference`. None: what the configuration says.
            from_job: a job of the same tenant with whose weights this one starts, in the place of a model.
            from_step: of that job's checkpoint. None: the newest.
            name: for people; None: the configuration's, or that of `from_job`.
            cpus: cores that it holds while it runs.
            gpus: likewise; a part of one below 1, whole ones above.
            memory_gib: likewise; a job that uses more is ended. 0: a share of its machine (docs/operations.md).
            priority: `low`, `normal` or `high`.
            private: only you and the tenant's admins see it. None: what the tenant's admins have decided.
            attached: cancel it when nobody has asked for it for a while.
            restarts: how often it is started again after its server was lost.

        Raises:
            InvalidRequest, ConfigError: it can't be run; the message says what is wrong.
            NotFound: there is no such job to start from, or no such checkpoint.
        """
        body = {
            "name": name or (config or {}).get("name"),
            "config": None if config is None else dict(config),
            "kind": kind,
            "from_job": from_job,
            "from_step": from_step,
            "resources": ResourcesBody(cpus=cpus, gpus=gpus, memory_gib=memory_gib).model_dump(),
            "priority": priority,
            "private": private,
            "attached": attached,
            "restarts": restarts,
        }
        answer = self.request("POST", "/jobs", json=body, headers={"idempotency-key": uuid.uuid4().hex})
        return Job(self, JobView.model_validate(answer).job_id)

    def jobs(self, **filters: Any) -> Iterator[JobView]:
        """The tenant's jobs, newest first. `filters`: state, user, name, kind."""
        cursor = None
        while True:
            params = filters | ({"cursor": cursor} if cursor else {})
            page = JobList.model_validate(self.request("GET", "/jobs", params=params))
            yield from page.jobs
            if page.cursor is None:
                return
            cursor = page.cursor

    def job(self, job_id: str) -> Job:
        """A job by its id. Whether there is one shows when it is asked something."""
        return Job(self, job_id)

    def request(self, method: str, path: str, **more: Any) -> Any:
        """Send a request, again where the server can't be reached or is busy; returns the JSON of the answer.

        Raises:
            PalestraError: what the server answered.
            ConnectionLost: it could not be reached.
        """
        until, pause, told = time.monotonic() + self.retry_seconds, 0.1, False
        while True:
            try:
                answer = self._http.request(method, path, **more)
                if answer.status_code not in RETRIED or time.monotonic() > until:
                    break
            except httpx2.TransportError as error:
                if time.monotonic() > until:
                    raise ConnectionLost(f"{self.url} can't be reached: {error}") from error
                if pause > 1.0 and not told:  # a person who waits wants to know for what
                    told = True
                    log.warning("%s can't be reached (%s); tried for %g s", self.url, error, self.retry_seconds)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, PAUSE_SECONDS)
        if answer.status_code >= 400:
            raise problem_of(answer)
        return answer.json() if answer.content else None

    def stream(self, path: str, **more: Any) -> Any:
        """A streamed answer, as a context manager."""
        return self._http.stream("GET", path, **more)


class Job:
    """A job that was submitted."""

    def __init__(self, control: ControlClient, job_id: str) -> None:
        self._control, self.job_id = control, job_id

    def view(self) -> JobView:
        """How it is now."""
        return JobView.model_validate(self._control.request("GET", f"/jobs/{self.job_id}"))

    def changes(self) -> list[ChangeView]:
        """Every change of its state."""
        return [ChangeView.model_validate(c) for c in self._control.request("GET", f"/jobs/{self.job_id}/changes")]

    def cancel(self) -> JobView:
        """End it; what it has trained is saved."""
        return JobView.model_validate(self._control.request("DELETE", f"/jobs/{self.job_id}"))

    def wait(self) -> JobView:
        """Wait until it is over, however it ends."""
        for _ in self.events():
            pass
        return self.view()

    def events(self) -> Iterator[JobEvent]:
        """All that happens, from its start until it is over; after a lost connection it goes on where it was."""
        last: str | None = None
        while True:
            headers = {"last-event-id": last} if last else {}
            try:
                with self._control.stream(f"/jobs/{self.job_id}/events", headers=headers) as answer:
                    _refused(answer)
                    for event in _events(answer.iter_lines()):
                        last = event.event_id
                        yield event
            except (httpx2.TransportError, ConnectionLost):
                self.view()  # raises where it stays unreachable
            else:
                if self.view().state in OVER:
                    return
            time.sleep(0.2 * random.uniform(0.5, 1.0))

    def logs(self, *, follow: bool = False, offset: int = 0) -> Iterator[str]:
        """Its log, a piece at a time; with `follow` until it is over."""
        params = {"follow": follow, "offset": offset}
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a piece may end within a character
        while True:
            try:
                with self._control.stream(f"/jobs/{self.job_id}/logs", params=params) as answer:
                    _refused(answer)
                    for chunk in answer.iter_bytes():
                        params["offset"] += len(chunk)
                        if text := decoder.decode(chunk):
                            yield text
                if not follow or self.view().state in OVER:
                    return
            except (httpx2.TransportError, ConnectionLost):
                self.view()  # raises where it stays unreachable
                time.sleep(0.2)

    def server(self) -> ServerView:
        """Where its data plane is, and the key that opens it.

        Raises:
            NotFound: it does not run now.
        """
        return ServerView.model_validate(self._control.request("GET", f"/jobs/{self.job_id}/server"))

    def rotate_key(self) -> str:
        """Give its data plane another key, and return it; those of before, and of its episodes, open nothing any more.

        Raises:
            Forbidden: it is another user's.
            NotFound: it has no key yet.
        """
        return JobKeyView.model_validate(self._control.request("POST", f"/jobs/{self.job_id}/rotate-key")).api_key

    def wait_for_server(self) -> ServerView:
        """The same, when it runs.

        Raises:
            JobOver: it is over.
        """
        while True:
            view = self.view()
            if view.state in OVER:
                raise JobOver(f"job {self.job_id} is {view.state}: {view.reason}")
            if view.state == "running":
                with contextlib.suppress(NotFound):  # it has ended meanwhile
                    return self.server()
            time.sleep(random.uniform(0.5, 1.0))

    @property
    def url(self) -> str:
        """Of its data plane, when it runs; after a restart it is another one. See `wait_for_server`."""
        return self.wait_for_server().url

    @property
    def key(self) -> str:
        """The key that opens its data plane, when it runs. See `wait_for_server`."""
        return self.wait_for_server().api_key

    def client(self, **more: Any) -> Client:
        """A client of its data plane, when it runs."""
        found = self.wait_for_server()
        return Client(found.url, found.api_key, **more)

    def artifacts(self) -> list[ArtifactView]:
        """The files of its run."""
        found = self._control.request("GET", f"/jobs/{self.job_id}/artifacts")
        return [ArtifactView.model_validate(artifact) for artifact in found]

    def download(self, path: str, to: Path) -> None:
        """One file, whole or not at all; after a lost connection it goes on where it was.

        Raises:
            NotFound: the run has no such file.
            ConnectionLost: nothing of it came for `retry_seconds`.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_name(f".{to.name}.part")
        try:
            with temporary.open("wb") as file:
                self._fetch(path, _Part(file))
            temporary.replace(to)
        finally:
            temporary.unlink(missing_ok=True)

    def _fetch(self, path: str, part: _Part) -> None:
        most, until = 0, time.monotonic() + self._control.retry_seconds
        while True:
            try:
                with self._control.stream(f"/jobs/{self.job_id}/artifacts/{path}", headers=part.headers) as answer:
                    _refused(answer)
                    part.take(answer)
                    return
            except (httpx2.TransportError, ConnectionLost) as error:
                if part.size > most:
                    most, until = part.size, time.monotonic() + self._control.retry_seconds
                elif time.monotonic() > until:
                    raise ConnectionLost(f"{path} can't be fetched: {error}") from error
            time.sleep(0.2 * random.uniform(0.5, 1.0))


class _Part:
    """A file that is being fetched: what is there of it, and which version of it that is."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._version = file, ""

    @property
    def size(self) -> int:
        return self._file.tell()

    @property
    def headers(self) -> dict[str, str]:
        """What to ask for: the rest, or all where the file is another one by now."""
        rest = {"range": f"bytes={self.size}-", "if-range": self._version} if self.size and self._version else {}
        return {"accept-encoding": "identity", **rest}

    def take(self, answer: httpx2.Response) -> None:
        if answer.status_code != 206:
            self._file.seek(0)
            self._file.truncate()
        self._version = answer.headers.get("etag", "")
        for chunk in answer.iter_bytes():
            self._file.write(chunk)


def _refused(answer: httpx2.Response) -> None:
    """Raise what a streamed answer says, if it is an error; ConnectionLost where it may be asked again."""
    if answer.status_code < 400:
        return
    answer.read()
    problem = problem_of(answer)
    raise ConnectionLost(str(problem)) if answer.status_code in RETRIED else problem


def _events(lines: Iterator[str]) -> Iterator[JobEvent]:
    found: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        elif "data" in found:
            yield JobEvent(found["id"], found["event"], json.loads(found["data"]))
            found = {}
