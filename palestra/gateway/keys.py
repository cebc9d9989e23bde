"""Keys of the data plane. An episode's key is derived, not stored, so a retried claim gets the same one."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from palestra.errors import Forbidden, Unauthorized
from palestra.http.guard import bearer
from palestra.ledger import Episodes
from palestra.ledger.key_files import job_key, sign


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """What an episode key says, after its signature was checked."""

    episode_id: str
    fence: int


class KeyRing:
    """Makes and checks the keys of one job from its run's secret."""

    def __init__(self, secret: Callable[[], bytes], job: str, given: str | None = None) -> None:
        """Args:
        secret: returns the secret of the moment; another one voids all keys that were made from the one of before.
        job: its name.
        given: a job key in the place of the one that is derived.
        """
        self._secret, self._job, self._given = secret, job, given
        self._derived = (b"", "")  # a secret, and the job's key that is made from it

    @property
    def job_key(self) -> str:
        """The job's key."""
        if self._given is not None:
            return self._given
        secret = self._secret()
        if self._derived[0] != secret:
            self._derived = secret, job_key(secret, self._job)
        return self._derived[1]

    def episode_key(self, episode_id: str, fence: int) -> str:
        """HMAC(secret, job, episode, fence), with episode and fence in clear in front of it."""
        return f"pe-{episode_id}.{fence}.{sign(self._secret(), self._job, 'episode', episode_id, str(fence))}"

    def check(self, key: str | None) -> EpisodeKey | None:
        """None: it is the job's key; otherwise the episode that it opens.

        Raises:
            Unauthorized: no key, or an unknown one.
        """
        if not key:
            raise Unauthorized("no key; send the header `Authorization: Bearer <key>`")
        if hmac.compare_digest(key.encode(), self.job_key.encode()):
            return None
        prefix, _, _ = key.rpartition(".")
        episode_id, _, fence = prefix.removeprefix("pe-").rpartition(".")
        known = key.startswith("pe-") and fence.isascii() and fence.isdigit() and len(fence) < 10
        if known and hmac.compare_digest(key.encode(), self.episode_key(episode_id, int(fence)).encode()):
            return EpisodeKey(episode_id, int(fence))
        raise Unauthorized("unknown key; it may be of another job, or the run has other keys by now")

    def require_job(self, request: Request) -> None:
        """The request must carry the job's key.

        Raises:
            Unauthorized, Forbidden: it does not.
        """
        if self.check(bearer(request)) is not None:
            raise Forbidden("this is an episode's key; this route takes the job's key")

    def opens_job(self, request: Request) -> bool:
        """Return whether the request carries the job's key of this moment."""
        return hmac.compare_digest((bearer(request) or "").encode(), self.job_key.encode())

    def require_episode(self, request: Request) -> EpisodeKey:
        """The request must carry an episode's key.

        Raises:
            Unauthorized, Forbidden: it does not.
        """
        key = self.check(bearer(request))
        if key is None:
            raise Forbidden("this is the job's key; this route takes the key of the episode (claim one)")
        return key

    async def require_this_episode(self, request: Request, episode_id: str, episodes: Episodes) -> EpisodeKey:
        """The request must carry the key of `episode_id`.

        Raises:
            Unauthorized, Forbidden: it does not.
            NotFound: there is no such episode.
        """
        key = self.check(bearer(request))
        if key is None or key.episode_id != episode_id:
            await episodes.get(episode_id)
            raise Forbidden(f"this key is not the key of episode {episode_id}")
        return key
