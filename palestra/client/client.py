"""The client of a data plane, the HTTP server of one job, for scripts; `async_client` has the one for event loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import httpx2

from palestra.client.episode import Episode, renewed_in_thread
from palestra.client.exchange import Action, Exchange, Reply, claim_next, hand_in, release_episode, send_call
from palestra.client.protocol import A, ApiCall, claim_call, heartbeat_call, upload_call
from palestra.client.requests import EpisodeRequests
from palestra.client.seat import Seat, claim_next_seat
from palestra.http_clients import http_client
from palestra.pictures.blobs import picture_digest

T = TypeVar("T")


class Client(EpisodeRequests[None]):
    """The synchronous client of a data plane; safe to share between threads.

    An episode belongs to the client that claimed it as long as its lease is renewed: by the server during each model
    call of the episode, by `with client.episode()` while the block is open, and by `heartbeat`. If a lease is not
    renewed for its duration (`rollout.lease_seconds`), another worker gets the episode.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, worker_id: str | None = None, retry_seconds: float = 300.0
    ) -> None:
        """Create a client of the data plane at `url`; see `EpisodeRequests`."""
        super().__init__(url, api_key, worker_id=worker_id, retry_seconds=retry_seconds)
        self._http = http_client()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, like the end of a `with` block."""
        self._http.close()

    def begin_episode(self, *, allow_discard_timeout: float | None = None) -> Episode | None:
        """Claim the next episode, waiting for one; None when the job is over.

        Only model calls renew the lease of this episode. Prefer `with client.episode()`, or call `heartbeat` if more
        time than the lease may pass between two calls.

        Args:
            allow_discard_timeout: lease of the episode in seconds: after so long without a sign of life, another worker
                gets the episode. None: the job's setting.

        Raises:
            Unauthorized: the key is not the job's.
            ConnectionLost: the server could not be reached for `retry_seconds`.
        """
        worker = self._settings.worker_id
        return self._run(claim_next(self._settings, lambda: claim_call(worker, allow_discard_timeout)))

    def upload_picture(self, data: bytes, episode: Episode | None = None) -> str:
        """Upload a picture, and return its digest for use in messages. Repeating it has no effect.

        Args:
            data: the file: PNG, JPEG, WebP or GIF, with one frame.
            episode: whose key to use; None: the job's.

        Raises:
            InvalidRequest: the file is not a supported picture.
            PayloadTooLarge: it is too large, or the run's pictures have no capacity for it.
        """
        digest = picture_digest(data)
        self._send(upload_call(data, digest, None if episode is None else episode.api_key))
        return digest

    @contextmanager
    def episode(self) -> Iterator[Episode | None]:
        """Claim an episode for a `with` block that sets `episode.reward`. Gives None when the job is over.

        The lease is renewed while the block is open, and its end submits the reward. After an exception in the block,
        including KeyboardInterrupt and SystemExit, the episode is released for another attempt, and the exception is
        raised again.

        Raises:
            InvalidRequest: the block ended without setting a reward; the episode was released.
        """
        episode = self.begin_episode()
        if episode is None:
            yield None
            return
        with self._held(
            episode,
            lambda: hand_in(self._settings, episode),
            lambda error: release_episode(self._settings, episode, error),
        ):
            yield episode

    @contextmanager
    def seat(self, role: str, *, episode_id: str | None = None) -> Iterator[Seat | None]:
        """Claim an external player's slot of an episode for a `with` block. Gives None when the job is over.

        The slot's lease is renewed while the block is open. A slot that is not over at the block's end is released,
        also after an exception, which is raised again. A slot may be lost meanwhile, because another player's worker is
        gone or this one's time ran out: then its observations end, or its next model call fails with 409, which ends
        the block. Check `seat.lost` after the block, and claim again.

        Args:
            role: name of the role; one of the job's `seats.roles`.
            episode_id: of the only episode to join, as reported by another worker of it; None: any.

        Raises:
            NotFound: the job has no such role, or no such episode.
            Conflict: the job has no external players, or this client (its `worker_id`) holds another slot of the
                episode.
        """
        claimed = self._run(claim_next_seat(self._settings, role, episode_id))
        if claimed is None:
            yield None
            return
        seat = Seat(self._run, self._settings, claimed, role)
        with self._held(claimed, seat.leaving, seat.settled):
            yield seat

    @contextmanager
    def _held(
        self, episode: Episode, end: Callable[[], Exchange[None]], settle: Callable[[BaseException], Exchange[bool]]
    ) -> Iterator[None]:
        """Renew a lease for a block, then call `end`; an error is raised again unless it is settled."""
        try:
            with renewed_in_thread(lambda episode: self._send(heartbeat_call(episode), retry_seconds=0.0), episode):
                yield
                self._run(end())
        except BaseException as error:
            if not self._run(settle(error)):
                raise

    def _send(self, call: ApiCall[A], retry_seconds: float | None = None) -> A:
        return self._run(send_call(self._settings, call, retry_seconds))

    def _finish(self, steps: Exchange[None]) -> None:
        self._run(steps)

    def _run(self, steps: Exchange[T]) -> T:
        return drive(self._http, steps)


def drive(http: httpx2.Client, steps: Exchange[T]) -> T:
    """Execute the actions that an exchange yields, and return its result."""
    reply: Reply = None
    try:
        while True:
            reply = _done(http, steps.send(reply))
    except StopIteration as end:
        result: T = end.value
        return result


def _done(http: httpx2.Client, action: Action) -> Reply:
    if isinstance(action, float):
        time.sleep(action)
        return None
    try:
        return http.request(**action)
    except httpx2.RequestError as error:
        return error
