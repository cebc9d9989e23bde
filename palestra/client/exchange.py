"""The retry rule of requests, without input or output.

Both clients (data plane and control plane) use it. A request is retried for up to `retry_seconds` while the server
cannot be reached, answers 408, 425, 429 or 5xx, or gives an answer that is not Palestra's. Pauses grow from 0.1 s to
LONGEST_PAUSE_SECONDS, and are longer if `Retry-After` says so. The first failure of an outage and its end are logged as
warnings. Permanent errors (an invalid URL, a TLS mismatch, a refusal) are raised at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from palestra.client.episode import Episode
from palestra.client.plain_values import checked_amount
from palestra.client.protocol import LONGEST_PAUSE_SECONDS, A, ApiCall, abort_call, finish_call, push_calls, read_claim
from palestra.client.task_files import TaskRows, task_source
from palestra.errors import (
    ClaimOver,
    ConfigError,
    Conflict,
    ConnectionLost,
    ContextOverflow,
    EpisodeEnded,
    EpisodeLeaseExpired,
    Forbidden,
    InvalidRequest,
    JobOver,
    NotFound,
    PalestraError,
    PayloadTooLarge,
    TooManyRequests,
    Unauthorized,
    causes_of,
)
from palestra.proxies import through_proxy
from palestra.types.wire import ClaimAnswer

log = logging.getLogger("palestra.client")
T = TypeVar("T")
Reply = httpx2.Response | httpx2.RequestError | None
Action = dict[str, Any] | float  # the arguments of a request, or seconds to pause
Exchange = Generator[Action, Reply, T]
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
_BY_CODE: dict[str, type[PalestraError]] = {
    "claim_over": ClaimOver,
    "episode_lease_expired": EpisodeLeaseExpired,
    "episode_ended": EpisodeEnded,
}
_CONTEXT_FULL = ContextOverflow(0, 0).code
_PASSING = (408, 425, 429)  # and every 5xx
_NOT_SERVED = (429, 503)  # the request has changed nothing


def checked_url(url: str, example: str) -> str:
    """Return a server's URL without a trailing slash."""
    try:
        parsed = httpx2.URL(url.strip())
        good = parsed.scheme in ("http", "https") and bool(parsed.host) and not (parsed.query or parsed.fragment)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"{url!r} is no URL of a server ({error}); it looks like {example}") from error
    if not good:
        raise ConfigError(f"{url!r} is no URL of a server; it begins with http:// or https://, like {example}")
    found = str(parsed).rstrip("/")
    if found.endswith("/v1"):
        raise ConfigError(f"{url!r} ends with /v1, which is for model clients; leave that out: {found[:-3]}")
    return found


def checked_key(key: str) -> str:
    """Return a key without white space around it."""
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the key has characters that no key has; copy it again")
    return key


def key_in(variable: str | None, setting: str) -> str:
    """Return the key in an environment variable; empty without a variable. `setting`: dotted name of the configuration
    key that names the variable, for the error message.
    """
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "")):
        raise ConfigError(f"{setting} is {variable!r}, and that variable is not set here")
    return checked_key(key)


class Endpoint:
    """A server as one client knows it: address, key, and whether it answers at present."""

    def __init__(self, url: str, key: str, retry_seconds: float) -> None:
        self.url, self.key = url, key
        self.retry_seconds = checked_amount("retry_seconds", retry_seconds, endless=True)
        self._draw = random.Random()
        self._lock = threading.Lock()
        self._failing_since: float | None = None  # monotonic; None: the last request was answered

    def backoff(self, attempt: int) -> float:
        """Return the pause in seconds after `attempt` failed attempts, with jitter."""
        return min(LONGEST_PAUSE_SECONDS, 0.1 * 2.0 ** min(attempt, 16)) * (0.5 + self._draw.random() / 2)

    def failed(self, error: PalestraError, retry_seconds: float) -> None:
        """Record that a request failed and will be retried; log only the first failure of an outage."""
        with self._lock:
            if self._failing_since is not None:
                return
            self._failing_since = time.monotonic()
        log.warning("%s; trying again for up to %g s", error, retry_seconds)

    def answered(self) -> None:
        """Record that the server answers, and log the end of an outage."""
        if self._failing_since is None:
            return
        with self._lock:
            since, self._failing_since = self._failing_since, None
        if since is not None:
            log.warning("%s answers again, after %.1f s", self.url, time.monotonic() - since)


class Settings(Endpoint):
    """A data plane as one client knows it, and the client's own name."""

    def __init__(self, url: str, api_key: str | None, worker_id: str | None, retry_seconds: float) -> None:
        key = api_key or os.environ.get("PALESTRA_API_KEY")
        if not key:
            raise ConfigError(
                "no API key: pass api_key=… or set PALESTRA_API_KEY (a run writes its key to RUN/api_key)"
            )
        super().__init__(checked_url(url, "http://127.0.0.1:7411"), checked_key(key), retry_seconds)
        self.worker_id = worker_id or f"{os.uname().nodename}-{os.getpid()}"

    def move(self, url: str, key: str) -> None:
        """Use the server's new address and key from now on."""
        self.url, self.key = checked_url(url, "http://127.0.0.1:7411"), checked_key(key)

    def request(self, call: ApiCall[Any], retries: int = 0) -> dict[str, Any]:
        """Return the arguments of `httpx2.Client.request` for a call. `retries`: number of earlier attempts, from which
        the server recognises a model call whose reply was lost.
        """
        headers = {
            "authorization": f"Bearer {call.key or self.key}",
            "content-type": "application/json",
            "x-stainless-retry-count": str(retries),
            **call.headers,
        }
        return {
            "method": call.method,
            "url": self.url + call.path,
            "content": call.body if call.body is None or isinstance(call.body, bytes) else call.body.model_dump_json(),
            "headers": headers,
            "timeout": call.timeout_seconds,
        }


def send_call(settings: Settings, call: ApiCall[A], retry_seconds: float | None = None) -> Exchange[A]:
    """Return the exchange for a call of a data plane, which is always idempotent."""
    sent = count()
    return exchange(
        settings,
        lambda: settings.request(call, next(sent)),
        lambda reply: call.answer.model_validate_json(reply.content, extra="ignore"),
        retry_seconds=retry_seconds,
    )


def exchange(
    endpoint: Endpoint,
    request: Callable[[], dict[str, Any]],
    read: Callable[[httpx2.Response], T],
    *,
    safe: bool = True,
    retry_seconds: float | None = None,
) -> Exchange[T]:
    """Yield requests to send (their replies are sent into the generator), or seconds to pause; return the result.

    None in place of a reply means that the server has a new address: it gets the whole `retry_seconds` again.

    Args:
        request: returns the arguments of the request, before each attempt.
        read: converts an answer below 300; a ValueError means that the answer is not Palestra's.
        safe: whether the request is idempotent.
    """
    seconds = endpoint.retry_seconds if retry_seconds is None else retry_seconds
    until, attempt = time.monotonic() + seconds, 0
    while True:
        reply = yield request()
        if reply is None:
            until, attempt = time.monotonic() + seconds, 0
            continue
        trouble = trouble_of(endpoint.url, reply)
        if trouble is None:
            assert isinstance(reply, httpx2.Response)
            try:
                result = read(reply)
            except ValueError as error:
                trouble = _garbled(endpoint.url, reply, error)
            else:
                endpoint.answered()
                return result
        pause = max(endpoint.backoff(attempt), trouble.pause_seconds)
        if not trouble.passing or not (safe or trouble.unsent) or time.monotonic() + pause > until:
            raise trouble.error
        if not isinstance(trouble.error, TooManyRequests):  # a busy server is not an outage
            endpoint.failed(trouble.error, seconds)
        attempt += 1
        yield pause


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a request has no answer, and how the client may react."""

    error: PalestraError
    passing: bool = False  # the same request may succeed later
    unsent: bool = False  # the server has certainly not acted on the request
    pause_seconds: float = 0.0  # as the server asks for


def trouble_of(url: str, reply: httpx2.Response | httpx2.RequestError) -> Trouble | None:
    """Return why a request has no usable answer, or None."""
    if isinstance(reply, httpx2.RequestError):
        return _unreachable(url, reply)
    if reply.status_code < 300:
        return None
    if reply.status_code < 400:
        place = reply.headers.get("location", "another place")
        return Trouble(ConfigError(f"{url} redirects to {place}, which is not followed: give the URL of the server"))
    return Trouble(
        problem_of(url, reply),
        passing=is_passing(reply.status_code),
        unsent=reply.status_code in _NOT_SERVED,
        pause_seconds=asked_pause(reply),
    )


def is_passing(status: int) -> bool:
    """Return whether the same request may succeed later, by the status of its answer."""
    return status in _PASSING or status >= 500


def asked_pause(reply: httpx2.Response) -> float:
    """Return the seconds that an answer asks to wait (`Retry-After`), or 0."""
    wait = reply.headers.get("retry-after", "")
    return float(wait) if wait.isascii() and wait.isdecimal() and len(wait) < 10 else 0.0


def _unreachable(url: str, error: httpx2.RequestError) -> Trouble:
    text = str(error) or type(error).__name__
    if any(isinstance(cause, ssl.SSLError) for cause in causes_of(error)):
        return Trouble(ConfigError(f"{url}: no TLS connection: {text}; perhaps its URL begins with http://"))
    if isinstance(error, httpx2.RemoteProtocolError) and text.startswith("illegal"):
        return Trouble(
            ConfigError(f"{url} does not speak HTTP ({text}); if it speaks TLS, its URL begins with https://")
        )
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError):
        return Trouble(ConfigError(f"{url} can't be asked: {text}"))
    lost = ConnectionLost(f"{url} can't be reached: {text}")
    return Trouble(lost, passing=True, unsent=isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout))


def _garbled(url: str, reply: httpx2.Response, error: ValueError) -> Trouble:
    shown = " ".join(repr(reply.content[:80])[2:-1].split())
    why = f"{url} answered {reply.status_code}{through_proxy(url)} with what is no answer of Palestra ({shown!r:.90})"
    lost = ConnectionLost(f"{why}; is that its URL, and what lies in between?")
    lost.__cause__ = error
    return Trouble(lost, passing=True)


def problem_of(url: str, reply: httpx2.Response) -> PalestraError:
    """Return the error of an answer of 400 or more, in the server's own words; `url` is the server's."""
    message, code = f"the server answered {reply.status_code}", None
    try:
        error = reply.json()["error"]
        message, code = str(error["message"]), error["code"]
    except (ValueError, KeyError, TypeError, RecursionError):  # not Palestra's: perhaps a proxy's
        message = f"{message}{through_proxy(url)}: {reply.text[:200]}"
    if code == _CONTEXT_FULL:
        with contextlib.suppress(ValueError):
            return ContextOverflow.of_message(message)
    if isinstance(code, str) and code in _BY_CODE:
        return _BY_CODE[code](message)
    passing = reply.status_code >= 500 or reply.status_code in (408, 425)
    kind = ConnectionLost if passing else _BY_STATUS.get(reply.status_code, PalestraError)
    return kind(message)


GIVE_BACK_SECONDS = 5.0  # limit for giving an episode back after an error; later, its lease runs out


def claim(
    settings: Settings,
    call: ApiCall[ClaimAnswer],
    read: Callable[[ClaimAnswer], tuple[Episode | None, bool]] = read_claim,
) -> Exchange[tuple[Episode | None, bool]]:
    """Send a claim; return the episode, or None, and whether the job is over."""
    try:
        return read((yield from send_call(settings, call)))
    except ClaimOver:
        return None, False
    except JobOver:
        return None, True


def claim_next(
    settings: Settings,
    call: Callable[[], ApiCall[ClaimAnswer]],
    read: Callable[[ClaimAnswer], tuple[Episode | None, bool]] = read_claim,
) -> Exchange[Episode | None]:
    """Send claims, each made by `call`, until one has an episode; return it, or None when the job is over."""
    episode, over = None, False
    while episode is None and not over:
        episode, over = yield from claim(settings, call(), read)
    return episode


def hand_in(settings: Settings, episode: Episode) -> Exchange[None]:
    """End an episode with the results set in its block."""
    if episode.reward is None and episode.named_rewards is None:
        raise InvalidRequest(f"episode {episode.episode_id}: set episode.reward before the block ends", "reward")
    metadata, named = episode.metadata or None, episode.named_rewards
    call = finish_call(episode, episode.reward, metadata=metadata, named_rewards=named, truncated=episode.truncated)
    yield from send_call(settings, call)


def release_episode(settings: Settings, episode: Episode, error: BaseException) -> Exchange[bool]:
    """Release an episode because of an error in its block, and return False: the error is not settled.

    A failure is only logged: the user must see the block's own error, and the lease expires by itself.
    """
    try:
        call = abort_call(episode, f"{type(error).__name__}: {error}", discard=False)
        yield from send_call(settings, call, GIVE_BACK_SECONDS)
    except Conflict as problem:
        log.info("episode %s is not this client's any more: %s", episode.episode_id, problem)
    except PalestraError as problem:
        log.warning("episode %s was not given back, its lease runs out instead: %s", episode.episode_id, problem)
    return False


def push(settings: Settings, train: TaskRows | str | Path, validation: TaskRows | str | Path) -> Exchange[None]:
    """Push all tasks of a job; see `Client.push_tasks`."""
    with (
        contextlib.closing(task_source(validation, "validation")) as held_out,
        contextlib.closing(task_source(train, "tasks")) as trained,
    ):
        for source in (held_out, trained):
            source.count()  # a wrong task is refused before any other is pushed
        for call in push_calls({"validation": held_out, "train": trained}):
            yield from send_call(settings, call)
