"""The client of a control plane: submit jobs from a laptop, watch them, download their results."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter

from palestra.client.arguments import checked_amount, checked_count
from palestra.client.client import Client, drive
from palestra.client.curves import REWARDS, LiveCurves
from palestra.client.exchange import Endpoint, checked_key, checked_url, exchange, trouble_of
from palestra.errors import ConfigError, ConnectionLost, JobOver, NotFound
from palestra.types.control_wire import (
    ArtifactView,
    ChangeView,
    JobKeyView,
    JobList,
    JobView,
    ResourcesBody,
    ServerView,
)

OVER = ("completed", "failed", "cancelled")
SAFE_METHODS = ("GET", "PUT", "PATCH", "DELETE")  # POST is safe too if it has an idempotency key


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event in the life of a job; `kind` is `state`, `step` (with its metrics), `evaluated`, `saved`, …"""

    event_id: str
    kind: str
    data: dict[str, Any]


class ControlClient:
    """Client of `palestra serve`. Requests that are safe to send again are sent again, for up to `retry_seconds`."""

    def __init__(self, url: str | None = None, key: str | None = None, *, retry_seconds: float = 60.0) -> None:
        """Create a client of the control plane at `url`.

        Args:
            url: URL of the server; None: the environment variable PALESTRA_URL.
            key: your API key; None: the environment variable PALESTRA_KEY.
            retry_seconds: how long a request is sent again while the server can't be reached.

        Raises:
            ConfigError: there is no URL, or `url` or `key` can't be one.
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
        """Return the URL of the control plane."""
        return self._endpoint.url

    @property
    def retry_seconds(self) -> float:
        """Return for how many seconds a request is sent again."""
        return self._endpoint.retry_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. `with` does it at the end of its block."""
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
        request_id: str | None = None,
    ) -> Job:
        """Submit a job that trains a model, or one that serves a trained one.

        Args:
            config: a JobConfig as a mapping, such as `JobConfig.model_dump(mode="json", exclude_none=True)`. None: the
                configuration of `from_job`, to be served unless `kind` says otherwise.
            kind: `training` or `inference`. None: as the configuration says.
            from_job: a job of the same tenant; this job starts with its weights instead of a model's.
            from_step: the step of that job's checkpoint. None: the newest.
            name: a name for people; None: the configuration's, or that of `from_job`.
            cpus: cores that the job holds while it runs.
            gpus: GPUs that the job holds while it runs: a part of one below 1, whole ones above.
            memory_gib: memory that the job holds while it runs, in GiB; a job that uses more is ended. 0: a share of
                its machine (docs/operations.md).
            priority: `low`, `normal` or `high`.
            private: whether only you and the tenant's admins see the job. None: as the tenant's admins have decided.
            attached: whether to cancel the job when no client has asked for it for a while.
            restarts: how often the job is started again after its server was lost.
            time_limit_seconds: how long the job may run, over all of its starts; then it saves and is cancelled. A job
                that ends in time may start before larger ones that wait for resources. None: no limit.
            request_id: names this submission: sent again under the same name, also by another process, the same job
                comes back. None: a new name.

        Returns:
            The submitted job, which may still be waiting.

        Raises:
            InvalidRequest, ConfigError: the job can't be run, or a number makes no sense; the message
                says why.
            NotFound: `from_job` or its checkpoint does not exist.
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
        view = self.request(
            "POST", "/jobs", JobView, json=body, headers={"idempotency-key": request_id or uuid.uuid4().hex}
        )
        return Job(self, view.job_id)

    def jobs(self, **filters: Any) -> Iterator[JobView]:
        """Iterate over the tenant's jobs, newest first.

        Args:
            **filters: values that jobs must have: `state`, `user`, `name` or `kind`.
        """
        cursor = None
        while True:
            params = filters | ({"cursor": cursor} if cursor else {})
            page = self.request("GET", "/jobs", JobList, params=params)
            yield from page.jobs
            if page.cursor is None:
                return
            cursor = page.cursor

    def job(self, job_id: str) -> Job:
        """Return a job by its id, without asking the server: a wrong id is noticed at the first request."""
        return Job(self, job_id)

    def request(self, method: str, path: str, answer: Any = Any, **more: Any) -> Any:
        """Send a request and return its answer; see `palestra.client.exchange` for when it is sent again.

        Args:
            method: HTTP method.
            path: path of the route.
            answer: type to validate the answer with. Any: JSON as it is; None if the answer is empty.
            **more: arguments for `httpx2.Client.request`.

        Raises:
            PalestraError: the error that the server answered with.
            ConnectionLost: the server could not be reached.
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
        """Open a streamed answer to GET `path`, as a context manager. It is sent once; the caller retries."""
        return self._http.stream("GET", path, **more)

    def check(self, answer: httpx2.Response) -> None:
        """Raise the error of a streamed answer, if it is one.

        Raises:
            ConnectionLost: the request may succeed if it is sent again.
            PalestraError: any other error that the server answered with.
        """
        if answer.status_code >= 300:
            answer.read()
        trouble = trouble_of(self.url, answer)
        if trouble is not None:
            raise ConnectionLost(str(trouble.error)) if trouble.passing else trouble.error


class Job:
    """A job of a control plane, by its id; every method asks the server."""

    def __init__(self, control: ControlClient, job_id: str) -> None:
        self._control, self.job_id = control, job_id
        # Ids may be pasted from anywhere; quoted, `../keys/ID` can't become the path of another route.
        self._path = f"/jobs/{quote(job_id, safe='')}"

    def view(self) -> JobView:
        """Return the job's state and what is known of it now."""
        return self._view("GET")

    def changes(self) -> list[ChangeView]:
        """Return every change of the job's state so far, in order."""
        found: list[ChangeView] = self._control.request("GET", f"{self._path}/changes", list[ChangeView])
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

    def watch(self, metrics: Sequence[str] = REWARDS) -> JobView:
        """Draw the job's curves in a notebook, again after each step, until it is over, and return its view.

        Interrupting the cell ends the drawing, and leaves the job running.

        Args:
            metrics: names of what is drawn (docs/metrics.md).

        Raises:
            ModuleNotFoundError: matplotlib or IPython is not installed.
            ConnectionLost: the control plane could not be reached for `retry_seconds`.
        """
        curves = LiveCurves(metrics, self.job_id)
        curves.show()
        with contextlib.suppress(KeyboardInterrupt):
            for event in self.events():
                if event.kind == "step":
                    curves.add([event.data])
        return self.view()

    def logs(self, *, follow: bool = False, offset: int = 0) -> Iterator[str]:
        """Iterate over pieces of the job's log.

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
        """Return the URL of the job's data plane and the key that opens it.

        Raises:
            NotFound: the job is not running now.
        """
        found: ServerView = self._control.request("GET", f"{self._path}/server", ServerView)
        return found

    def rotate_key(self) -> str:
        """Give the job's data plane a new key and return it. Earlier keys, and those of open episodes, stop working.

        Raises:
            Forbidden: the job belongs to another user.
            NotFound: the job has no key yet.
        """
        return JobKeyView.model_validate(self._control.request("POST", f"{self._path}/rotate-key")).api_key

    def wait_for_server(self) -> ServerView:
        """Wait until the job runs, and return the URL of its data plane and the key that opens it.

        After a restart of the job its URL may be another one.

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
        """Download one file of the job's run. The file at `to` is complete or absent; a lost connection is resumed.

        Args:
            path: path of the file, as `artifacts` lists it.
            to: where to write it; missing folders are made.

        Raises:
            NotFound: the run has no such file.
            ConnectionLost: no byte of it arrived for `retry_seconds`.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_name(f".{to.name}.part")
        try:
            with temporary.open("wb") as file:
                self._fetch(path, _EventText(file))
            temporary.replace(to)
        finally:
            temporary.unlink(missing_ok=True)

    def _fetch(self, path: str, part: _EventText) -> None:
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


class _EventText:
    """A file that is being downloaded: how much has arrived, and of which version (ETag) of the file."""

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
    """Parse lines of server-sent events.

    Raises:
        ConnectionLost: the lines are not events of Palestra, so something between client and server sent them.
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
