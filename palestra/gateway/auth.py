"""Who calls a data plane: the keys that open it, and the session that a model call gets by its key.

An episode's key is derived, not stored, so that a claim that is sent again gets the same one.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request

from palestra.config import JobKind
from palestra.errors import Conflict, Forbidden, Unauthorized
from palestra.http.guard import bearer
from palestra.ledger import Episodes
from palestra.ledger.key_files import job_key, sign
from palestra.session import EpisodeSession, Session, Sessions

_OPENS = "palestra.opens"  # where the scope of a request has what its key opens
OpenSession = Callable[[], AbstractAsyncContextManager[Session]]  # for the time of one request


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """The lease that an episode's key opens; its signature has been checked."""

    episode_id: str
    fence: int


class KeyRing:
    """Makes and checks the keys of one job from its run's secret."""

    def __init__(self, secret: Callable[[], bytes], job: str, given: str | None = None) -> None:
        """Make the keys of a job.

        Args:
            secret: returns the secret of the moment; another one voids all keys that were made from the one of before.
            job: the job's name.
            given: a job key in the place of the one that is derived.
        """
        self._secret, self._job, self._given = secret, job, given
        self._derived = (b"", "")  # a secret, and the job's key that is made from it

    @property
    def job_key(self) -> str:
        """The job's key."""
        return self._job_key(self._secret())

    def episode_key(self, episode_id: str, fence: int) -> str:
        """Return the key of an episode's lease: HMAC(secret, job, episode, fence), after episode and fence in clear."""
        return self._episode_key(self._secret(), episode_id, fence)

    def _job_key(self, secret: bytes) -> str:
        if self._given is not None:
            return self._given
        if self._derived[0] != secret:
            self._derived = secret, job_key(secret, self._job)
        return self._derived[1]

    def _episode_key(self, secret: bytes, episode_id: str, fence: int) -> str:
        return f"pe-{episode_id}.{fence}.{sign(secret, self._job, 'episode', episode_id, str(fence))}"

    def check(self, key: str | None) -> EpisodeKey | None:
        """Return the episode that a key opens; None: it is the job's key.

        Raises:
            Unauthorized: no key, or an unknown one.
        """
        if not key:
            raise Unauthorized("no key; send the header `Authorization: Bearer <key>`")
        secret = self._secret()  # once: each look at it asks the file system
        if hmac.compare_digest(key.encode(), self._job_key(secret).encode()):
            return None
        prefix, _, _ = key.rpartition(".")
        episode_id, _, fence = prefix.removeprefix("pe-").rpartition(".")
        known = key.startswith("pe-") and fence.isascii() and fence.isdigit() and len(fence) < 10
        if known and hmac.compare_digest(key.encode(), self._episode_key(secret, episode_id, int(fence)).encode()):
            return EpisodeKey(episode_id, int(fence))
        raise Unauthorized("unknown key; it may be of another job, or the run has other keys by now")

    def admit(self, request: Request) -> None:
        """Check the key of a request before its body is read. The same request's `require_episode` costs nothing then.

        Raises:
            Unauthorized: no key, or an unknown one.
        """
        request.scope[_OPENS] = self.check(bearer(request))

    def require_job(self, request: Request) -> None:
        """Check that a request carries the job's key of this moment.

        Raises:
            Unauthorized, Forbidden: it does not.
        """
        if self.check(bearer(request)) is not None:
            raise Forbidden("this is an episode's key; this route takes the job's key")

    def opens_job(self, request: Request) -> bool:
        """Return whether the request carries the job's key of this moment."""
        return hmac.compare_digest((bearer(request) or "").encode(), self.job_key.encode())

    def require_episode(self, request: Request) -> EpisodeKey:
        """Return the episode that a request's key opens.

        Raises:
            Unauthorized, Forbidden: the request does not carry an episode's key.
        """
        key = request.scope[_OPENS] if _OPENS in request.scope else self.check(bearer(request))
        if key is None:
            raise Forbidden("this is the job's key; this route takes the key of the episode (claim one)")
        return key

    async def require_this_episode(self, request: Request, episode_id: str, episodes: Episodes) -> EpisodeKey:
        """Check that a request carries the key of an episode, and return what it opens.

        Args:
            request: of a worker.
            episode_id: of the episode.
            episodes: of the job, which know what episodes there are.

        Raises:
            Unauthorized, Forbidden: it does not.
            NotFound: there is no such episode.
        """
        key = self.check(bearer(request))
        if key is None or key.episode_id != episode_id:
            await episodes.get(episode_id)
            raise Forbidden(f"this key is not the key of episode {episode_id}")
        return key


def session_opener(kind: JobKind, keys: KeyRing, sessions: Sessions, request: Request) -> OpenSession:
    """Check the key of a model call, and return what opens the session that the call is made in.

    Args:
        kind: of the job: an episode's session where it trains, one of the request's own where it serves a model.
        keys: of the job.
        sessions: of the job.
        request: the call.

    Raises:
        Unauthorized: no key, or an unknown one.
        Forbidden: the job's key where episodes are played, or an episode's where a model is served.
    """
    if kind == "inference":
        keys.require_job(request)
        return sessions.stateless
    return partial(_of_lease, sessions, keys.require_episode(request))


@asynccontextmanager
async def _of_lease(sessions: Sessions, key: EpisodeKey) -> AsyncIterator[EpisodeSession]:
    yield await sessions.open(key.episode_id, key.fence)


async def refuse_episodes(kind: JobKind, keys: KeyRing, request: Request) -> None:
    """Refuse a request about episodes to a job that has none.

    Args:
        kind: of the job.
        keys: of the job.
        request: to a route for episodes.

    Raises:
        Conflict: the job serves a model.
        Unauthorized: so it does, and the key is not of this job.
    """
    if kind == "inference":
        keys.check(bearer(request))
        raise Conflict(
            "this job serves a model and has no episodes; call /v1/chat/completions, or another dialect, with its key"
        )
