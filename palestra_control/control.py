"""The client of a control plane: submits jobs, and reconnects to them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypedDict, Unpack

import httpx2
from pydantic import TypeAdapter

from palestra.client.client import drive
from palestra.client.exchange import Endpoint, checked_key, checked_url, exchange, trouble_of
from palestra.client.plain_values import checked_amount, checked_count, plain_object
from palestra.errors import ConfigError, ConnectionLost
from palestra.http_clients import http_client
from palestra_control.job import Job
from palestra_control.wire import JobList, JobView, ResourcesBody

SAFE_METHODS = ("GET", "PUT", "PATCH", "DELETE")  # POST is safe too if it has an idempotency key


class SubmitFields(TypedDict, total=False):
    """What a submission may say besides the configuration: the fields of `SubmitJob` and of its resources."""

    name: str | None
    kind: Literal["training", "inference"] | None
    priority: Literal["low", "normal", "high"] | None
    config_toml: str | None
    from_job: str | None
    from_step: int | None
    resources: Mapping[str, Any] | None
    attached: bool | None
    restarts: int | None
    time_limit_seconds: float | None
    cpus: float | None
    gpus: float | None
    memory_gib: float | None
    gpu_kind: str | None
    labels: Mapping[str, str] | None
    bundles: Sequence[Mapping[str, Any]] | None
    placement: Literal["PACK", "STRICT_PACK", "SPREAD"] | None


class ControlClient:
    """Client of `palestra serve`. Idempotent requests are retried for up to `retry_seconds`."""

    def __init__(self, url: str | None = None, key: str | None = None, *, retry_seconds: float = 60.0) -> None:
        """Create a client of the control plane at `url`.

        Args:
            url: URL of the server; None: the environment variable PALESTRA_URL.
            key: your API key; None: the environment variable PALESTRA_KEY.
            retry_seconds: how long to retry a request while the server cannot be reached.

        Raises:
            ConfigError: there is no URL, or `url` or `key` is invalid.
        """
        url = url or os.environ.get("PALESTRA_URL")
        if not url:
            raise ConfigError("no control plane: give its URL, or set the variable PALESTRA_URL")
        url = checked_url(url, "http://127.0.0.1:7400")
        key = checked_key(key or os.environ.get("PALESTRA_KEY", ""))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._endpoint = Endpoint(url, key, retry_seconds)
        self._http = http_client(base_url=url, headers=headers, timeout=httpx2.Timeout(30.0, read=60.0))

    @property
    def url(self) -> str:
        """Return the URL of the control plane."""
        return self._endpoint.url

    @property
    def retry_seconds(self) -> float:
        """Return for how many seconds a request is retried."""
        return self._endpoint.retry_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, like the end of a `with` block."""
        self._http.close()

    def submit(
        self, config: Mapping[str, Any] | None = None, *, request_id: str | None = None, **fields: Unpack[SubmitFields]
    ) -> Job:
        """Submit a job that trains a model, or one that serves a trained one; return it, which may still be waiting.

        Args:
            config: a JobConfig as a mapping, such as `JobConfig.model_dump(mode="json", exclude_none=True)`. None: the
                configuration of `from_job`, which is served unless `kind` is `training`.
            request_id: idempotency key: repeating the submission with it, even from another process, returns the same
                job. None: a new one.
            **fields: those of `SubmitJob`: `kind`, `from_job`, `from_step`, `name`, `priority`, `attached`,
                `restarts`, `time_limit_seconds`; and those of `ResourcesBody`: `cpus`, `gpus`, `memory_gib`,
                `gpu_kind`, `labels`, `bundles`, `placement`. None: the default (docs/reference/api.md).

        Raises:
            InvalidRequest, ConfigError: the job cannot run, or a number is invalid; the message says why.
            NotFound: `from_job` or its checkpoint does not exist.
        """
        if unknown := fields.keys() - SubmitFields.__annotations__.keys():
            raise TypeError(f"submit() has no argument {min(unknown)!r}")
        given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        for name in given.keys() & {"cpus", "gpus", "memory_gib", "time_limit_seconds"}:
            given[name] = checked_amount(name, given[name], above_zero=name == "time_limit_seconds")
        if "restarts" in given:
            given["restarts"] = checked_count("restarts", given["restarts"], 0)
        own = {name: given.pop(name) for name in ResourcesBody.model_fields if name in given}
        resources = plain_object({**given.pop("resources", {}), **own}, "resources")
        if config is not None:
            given = {"name": config.get("name"), "config": dict(config)} | given
        headers = {"idempotency-key": request_id or uuid.uuid4().hex}
        view = self.request("POST", "/jobs", JobView, json={**given, "resources": resources}, headers=headers)
        return Job(self, view.job_id, view.estimate)

    def jobs(self, **filters: Any) -> Iterator[JobView]:
        """Iterate over the tenant's jobs, newest first.

        Args:
            **filters: required values of the jobs' `state`, `user`, `name` or `kind`.
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
        """Return a job by its id, without asking the server: a wrong id fails at the first request."""
        return Job(self, job_id)

    def request(self, method: str, path: str, answer: Any = Any, **more: Any) -> Any:
        """Send a request and return its answer; see `palestra.client.exchange` for retries.

        Args:
            method: HTTP method.
            path: path of the route.
            answer: type to validate the answer with. Any: raw JSON; None if the answer is empty.
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
        """Open a streamed answer to GET `path`, as a context manager. It is sent once, without retries."""
        return self._http.stream("GET", path, **more)

    def check(self, answer: httpx2.Response) -> None:
        """Raise the error of a streamed answer, if it is one.

        Raises:
            ConnectionLost: a retry may succeed.
            PalestraError: any other error that the server answered with.
        """
        if answer.status_code >= 300:
            answer.read()
        trouble = trouble_of(self.url, answer)
        if trouble is not None:
            raise ConnectionLost(str(trouble.error)) if trouble.passing else trouble.error


def data_plane_of(job_id: str, control: str | None = None) -> Callable[[], tuple[str, str]]:
    """Return a function that asks the control plane for URL and key of a job's data plane, once the job has one.

    Args:
        control: URL of the control plane; None: the environment variable PALESTRA_URL.
    """

    def find() -> tuple[str, str]:
        with ControlClient(control) as client:
            found = client.job(job_id).wait_for_server()
        return found.url, found.api_key

    return find
