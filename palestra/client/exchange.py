"""How a request is sent until it is answered: the decisions alone, shared by both clients, without any input or output.

All calls are idempotent, so those that the server could not serve now are sent again, for up to `retry_seconds`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Generator
from typing import Any

import httpx2

from palestra.client.protocol import LONGEST_PAUSE_SECONDS, Call
from palestra.errors import (
    ClaimOver,
    ConfigError,
    Conflict,
    ConnectionLost,
    Forbidden,
    InvalidRequest,
    NotFound,
    PalestraError,
    PayloadTooLarge,
    TooManyRequests,
    Unauthorized,
)

Reply = httpx2.Response | httpx2.TransportError | None
_BY_STATUS: dict[int, type[PalestraError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: PayloadTooLarge,
    422: InvalidRequest,
    429: TooManyRequests,
}


class Settings:
    """What a client is told."""

    def __init__(self, url: str, api_key: str | None, worker_id: str | None, retry_seconds: float) -> None:
        key = api_key or os.environ.get("PALESTRA_API_KEY")
        if not key:
            raise ConfigError(
                "no API key: pass api_key=… or set PALESTRA_API_KEY (a run writes its key to RUN/api_key)"
            )
        self.url, self.key = url.rstrip("/"), key
        self.worker_id = worker_id or f"{os.uname().nodename}-{os.getpid()}"
        self.retry_seconds = retry_seconds
        self.draw = random.Random()

    def request(self, call: Call) -> dict[str, Any]:
        """Arguments of `post`."""
        return {
            "url": self.url + call.path,
            "content": call.body.model_dump_json(),
            "headers": {"authorization": f"Bearer {call.key or self.key}", "content-type": "application/json"},
            "timeout": call.timeout_seconds,
        }


def exchange(settings: Settings, call: Call) -> Generator[dict[str, Any] | float, Reply, Any]:
    """Yields what to do: post with these arguments (and send the reply in), or pause for these seconds.

    Returns the answer's JSON.

    Raises:
        PalestraError: the server refuses, or did not answer in time (ConnectionLost).
    """
    until, attempt = time.monotonic() + settings.retry_seconds, 0
    while True:
        reply = yield settings.request(call)
        if isinstance(reply, httpx2.Response):
            if reply.status_code < 300:
                return reply.json()
            problem = problem_of(reply)
            if reply.status_code != 429 and reply.status_code < 500:
                raise problem
        else:
            problem = ConnectionLost(f"{settings.url} can't be reached: {str(reply) or type(reply).__name__}")
        pause = min(LONGEST_PAUSE_SECONDS, 0.1 * 2.0**attempt) * (0.5 + settings.draw.random() / 2)
        if time.monotonic() + pause > until:
            raise problem
        attempt += 1
        yield pause


def problem_of(reply: httpx2.Response) -> PalestraError:
    """The error that an answer stands for, in the server's own words."""
    message, code = f"the server answered {reply.status_code}", None
    try:
        error = reply.json()["error"]
        message, code = str(error["message"]), error["code"]
    except (ValueError, KeyError, TypeError):  # not one of ours: a proxy in between, perhaps
        message = f"{message}: {reply.text[:200]}"
    if code == "claim_over":
        return ClaimOver(message)
    kind = ConnectionLost if reply.status_code >= 500 else _BY_STATUS.get(reply.status_code, PalestraError)
    return kind(message)
