"""The client of a data plane, the HTTP server of one job, for scripts; `async_client` has the one for event loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from palestra.client.episode import Episode, Reward, RolloutResult, renewed_in_thread
from palestra.client.exchange import Action, Exchange, Reply, Settings, claim, hand_in, push, release_episode, send_call
from palestra.client.protocol import A, ApiCall, abort_call, claim_call, finish_call, heartbeat_call, upload_call
from palestra.client.seat import Seat, seat_of
from palestra.http_clients import http_client
from palestra.pictures.blobs import picture_digest

T = TypeVar("T")
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)


class Client:
    """The synchronous client of a data plane; safe to share between threads.

    An episode belongs to the client that claimed it as long as its lease is renewed: by the server during each model
    call of the episode, by `with client.episode()` while the block is open, and by `heartbeat`. If a lease is not
    renewed for its duration (`rollout.lease_seconds`), another worker gets the episode.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        worker_id: str | None = None,
        retry_seconds: float = 300.0,
    ) -> None:
        """Create a client of the data plane at `url`.

        Args:
            url: URL of the server, as printed by `palestra run`, e.g. `http://127.0.0.1:7411`.
            api_key: the job's key; None: the environment variable PALESTRA_API_KEY.
            worker_id: a name, recorded with each episode.
            retry_seconds: how long to retry a call while the server cannot be reached, for example while it restarts.
                The first failure and the server's return are logged as warnings of the logger `palestra.client`.

        Raises:
            ConfigError: there is no key, or `url` is not a valid URL.
        """
        self._settings = Settings(url, api_key, worker_id, retry_seconds)
        self._http = http_client(limits=LIMITS)

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
        episode, over = None, False
        while episode is None and not over:
            episode, over = self._run(
                claim(self._settings, claim_call(self._settings.worker_id, allow_discard_timeout))
            )
        return episode

    def end_episode(
        self,
        episode: Episode,
        reward: Reward | RolloutResult | None = None,
        *,
        step_rewards: Sequence[Reward] | None = None,
        metadata: Mapping[str, Any] | None = None,
        named_rewards: Mapping[str, float | None] | None = None,
        truncated: bool = False,
    ) -> None:
        """Submit the reward of an episode. When the call returns, the reward is on the server's disk.

        Args:
            episode: the claimed episode.
            reward: a finite number, or one for each agent by name; None: there are named rewards. Or a `RolloutResult`,
                which contains all of the following; one without a score leaves the episode out of training.
            step_rewards: for each TimeStep, in order, a reward, or rewards by agent; None: none.
            metadata: JSON to record with the episode; `palestra episodes` shows it.
            named_rewards: several rewards of the episode, by name, which the job weights and adds up
                (`algorithm.reward_weights`). None in place of one: not scored, which differs from 0.
            truncated: whether the episode was cut off before its end, for example by a step limit.

        Raises:
            Conflict: the episode was given to another worker, or ended before with another reward.
            InvalidRequest: a reward is not a finite number, or the metadata is not JSON.
        """
        parts = {"step_rewards": step_rewards, "metadata": metadata, "named_rewards": named_rewards}
        self._send(finish_call(episode, reward, **parts, truncated=truncated))

    def abort_episode(self, episode: Episode, reason: str = "", *, discard: bool = False) -> None:
        """Release an episode without a reward, because of a failure not caused by the policy.

        Args:
            episode: the claimed episode.
            reason: text to record with the attempt.
            discard: whether to drop the episode instead of retrying it.
        """
        self._send(abort_call(episode, reason, discard))

    def heartbeat(self, episode: Episode) -> None:
        """Renew the lease of an episode that is played outside a `with` block.

        Needed only if more time than the lease may pass between two model calls of the episode.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the episode no longer belongs to this client.
        """
        self._send(heartbeat_call(episode))

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

    def push_tasks(
        self, train: Iterable[Mapping[str, Any]] | str | Path, validation: Iterable[Mapping[str, Any]] | str | Path = ()
    ) -> None:
        """Push all tasks of the job at once; pushing the same tasks again has no effect.

        Args:
            train: tasks to train on: JSON objects, whose key `id`, if present, also names the task, in a list, an
                iterator, a data set or a DataFrame; or the path of a JSONL file with one per line. All are checked
                before the first is sent; those of an iterator wait in a temporary file.
            validation: tasks to evaluate on, in the same forms.

        Raises:
            ConfigError: the file is missing, or a line is not a JSON object; nothing is pushed.
            InvalidRequest: a task is not a JSON object.
        """
        self._run(push(self._settings, train, validation))

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
        claimed, over = None, False
        while claimed is None and not over:
            call = claim_call(self._settings.worker_id, None, role=role, episode_id=episode_id)
            claimed, over = self._run(claim(self._settings, call, seat_of))
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
