"""The client of a control plane: submit jobs from a laptop, watch them, get what they made."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter

from palestra.client.arguments import checked_amount, checked_count
from palestra.client.client import Client, drive
from palestra.client.exchange import Endpoint, checked_key, checked_url, exchange, trouble_of
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

OVER = ("completed", "failed", "cancelled")
SAFE_METHODS = ("GET", "PUT", "PATCH", "DELETE")  # and POST with an idempotency key


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened in a job: `state`, `step` (with its metrics), `evaluated`, `saved`, …"""

    event_id: str
    kind: str
    data: dict[str, Any]


class ControlClient:
    """Talks to `palestra serve`. A request that is safe to send again is, for up to `retry_seconds`."""

    def __init__(self, url: str | None = None, key: str | None = None, *, retry_seconds: float = 60.0) -> None:
        """`url` and `key`: None: the variables PALESTRA_URL and PALESTRA_KEY.

        Raises:
            ConfigError: no URL, or what can't be one or a key.
        """
        url = url or os.environ.get("PALESTRA_URL")
        if not url:
            raise ConfigError("no control plane: give its URL, or set the variable PALESTRA_URL")
        url = checked_url(url, "http://127.0.0.1:7400")
        key = checked_key(key or os.environ.get("PALESTRA_KEY", ""))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._endpoint = Endpoint(url, key, retry_seconds)
        self._http = httpx2.Client(base_url=url, headers=headers, timeout=httpx2.Timeout(30.0, read=60.0))

    @property
    def url(self) -> str:
        """Of the control plane."""
        return self._endpoint.url

    @property
    def retry_seconds(self) -> float:
        """How long a request is sent again."""
        return self._endpoint.retry_seconds

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
        time_limit_seconds: float | None = None,
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
            gpus: GPUs that it holds while it runs: a part of one below 1, whole ones above.
            memory_gib: memory that it holds while it runs, in GiB; a job that uses more is ended. 0: a share of its
                machine (docs/operations.md).
            priority: `low`, `normal` or `high`.
            private: only you and the tenant's admins see it. None: what the tenant's admins have decided.
            attached: cancel it when nobody has asked for it for a while.
            restarts: how often it is started again after its server was lost.
            time_limit_seconds: how long it may run, over all of its starts; then it saves and is cancelled. A job that
                ends in time may start before larger ones that wait for room. None: any time.

        Raises:
            InvalidRequest, ConfigError: it can't be run, or a number makes no sense; the message says what is wrong.
            NotFound: there is no such job to start from, or no such checkpoint.
        """
        body = {
            "name": name or (config or {}).get("name"),
            "config": None if config is None else dict(config),
            "kind": kind,
            "from_job": from_job,
            "from_step": from_step,
            "resources": ResourcesBody(
                cpus=checked_amount("cpus", cpus),
                gpus=checked_amount("gpus", gpus),
                memory_gib=checked_amount("memory_gib", memory_gib),
            ).model_dump(),
            "priority": priority,
            "private": private,
            "attached": attached,
            "restarts": checked_count("restarts", restarts, 0),
            "time_limit_seconds": None
            if time_limit_seconds is None
            else checked_amount("time_limit_seconds", time_limit_seconds, above_zero=True),
        }
        view = self.request("POST", "/jobs", JobView, json=body, headers={"idempotency-key": uuid.uuid4().hex})
        return Job(self, view.job_id)

    def jobs(self, **filters: Any) -> Iterator[JobView]:
        """The tenant's jobs, newest first. `filters`: state, user, name, kind."""
        cursor = None
        while True:
            params = filters | ({"cursor": cursor} if cursor else {})
            page = self.request("GET", "/jobs", JobList, params=params)
            yield from page.jobs
            if page.cursor is None:
                return
            cursor = page.cursor

    def job(self, job_id: str) -> Job:
        """A job by its id. Whether there is one shows when it is asked something."""
        return Job(self, job_id)

    def request(self, method: str, path: str, answer: Any = Any, **more: Any) -> Any:
        """Send a request and return its answer; see `palestra.client.exchange` for when it is sent again.

        Args:
            method: of HTTP.
            path: of the route.
            answer: the type of the answer; Any: JSON as it comes, None where there is none.
            **more: arguments of `httpx2.Client.request`.

        Raises:
            PalestraError: what the server answered.
            ConnectionLost: it could not be reached.
        """
        arguments = {"method": method, "url": path, **more}
        safe = method in SAFE_METHODS or "idempotency-key" in more.get("headers", {})
        form = TypeAdapter(answer)

        def read(reply: httpx2.Response) -> Any:
            if reply.status_code == 204:
                return None
            return form.validate_json(reply.content, extra="ignore" if answer is not Any else None)

        return drive(self._http, exchange(self._endpoint, lambda: arguments, read, safe=safe))

    def stream(self, path: str, **more: Any) -> Any:
        """A streamed answer, as a context manager."""
        return self._http.stream("GET", path, **more)

    def check(self, answer: httpx2.Response) -> None:
        """Raise what a streamed answer says, if it is an error; ConnectionLost where it may be asked again."""
        if answer.status_code >= 300:
            answer.read()
        trouble = trouble_of(self.url, answer)
        if trouble is not None:
            raise ConnectionLost(str(trouble.error)) if trouble.passing else trouble.error


class Job:
    """A job that was submitted."""

    def __init__(self, control: ControlClient, job_id: str) -> None:
        self._control, self.job_id = control, job_id
        # A job's id may be anything that somebody has pasted: `../keys/ID` must not become another path.
        self._path = f"/jobs/{quote(job_id, safe='')}"

    def view(self) -> JobView:
        """How it is now."""
        return self._view("GET")

    def changes(self) -> list[ChangeView]:
        """Every change of its state."""
        found: list[ChangeView] = self._control.request("GET", f"{self._path}/changes", list[ChangeView])
        return found

    def cancel(self) -> JobView:
        """End it; what it has trained is saved."""
        return self._view("DELETE")

    def _view(self, method: str) -> JobView:
        view: JobView = self._control.request(method, self._path, JobView)
        return view

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
                with self._control.stream(f"{self._path}/events", headers=headers) as answer:
                    self._control.check(answer)
                    for event in _events(answer.iter_lines()):
                        last = event.event_id
                        yield event
            except (httpx2.RequestError, ConnectionLost):
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
                with self._control.stream(f"{self._path}/logs", params=params) as answer:
                    self._control.check(answer)
                    for chunk in answer.iter_bytes():
                        params["offset"] += len(chunk)
                        if text := decoder.decode(chunk):
                            yield text
                if not follow or self.view().state in OVER:
                    return
            except (httpx2.RequestError, ConnectionLost):
                self.view()  # raises where it stays unreachable
                time.sleep(0.2)

    def server(self) -> ServerView:
        """Where its data plane is, and the key that opens it.

        Raises:
            NotFound: it does not run now.
        """
        found: ServerView = self._control.request("GET", f"{self._path}/server", ServerView)
        return found

    def rotate_key(self) -> str:
        """Give its data plane another key, and return it; those of before, and of its episodes, open nothing any more.

        Raises:
            Forbidden: it is another user's.
            NotFound: it has no key yet.
        """
        return JobKeyView.model_validate(self._control.request("POST", f"{self._path}/rotate-key")).api_key

    def wait_for_server(self) -> ServerView:
        """Wait until the job runs, and return where its data plane is and the key that opens it.

        After a restart of the job its URL may be another one.

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

    def client(self, **more: Any) -> Client:
        """A client of its data plane, when it runs."""
        found = self.wait_for_server()
        return Client(found.url, found.api_key, **more)

    def artifacts(self) -> list[ArtifactView]:
        """The files of its run."""
        found: list[ArtifactView] = self._control.request("GET", f"{self._path}/artifacts", list[ArtifactView])
        return found

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


def _events(lines: Iterator[str]) -> Iterator[JobEvent]:
    """Read server-sent events.

    Raises:
        ConnectionLost: what came is none of ours.
    """
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
