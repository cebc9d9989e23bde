"""Authentication of a data plane: its keys, and the sessions of model calls.

An episode's key is derived from the run's secret, not stored, so that a repeated claim gets the same key.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from starlette.requests import Request

from palestra.config import JobKind
from palestra.errors import Conflict, Forbidden, Unauthorized
from palestra.http.guard import bearer
from palestra.session import CallMaker, EpisodeSession, SeatKey, SeatSession, Sessions
from palestra.store import Episodes
from palestra.store.key_files import job_key, seat_key, sign

MOST_EPISODES = 4096  # whose keys are kept
MODEL_ROUTES = "/v1/"  # beginning of the paths of all dialects
_OPENS = "palestra.opens"  # the place in a request's scope for the checked key
OpenSession = Callable[[], AbstractAsyncContextManager[CallMaker]]  # open for one request


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """The lease of an episode's key; exists only after the key's signature was checked."""

    episode_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class RoleKey:
    """The player slot that a key may claim; exists only after the key's signature was checked."""

    role: str


@dataclass(frozen=True, slots=True)
class TalkKey:
    """Calls of the job's policies outside episodes, for the chat playground; exists only after the key was checked."""


class KeyRing:
    """Creates and checks the keys of one job from its run's secret."""

    def __init__(
        self, secret: Callable[[], bytes], job: str, given: str | None = None, seats: Sequence[str] = ()
    ) -> None:
        """Create the key ring of a job.

        Args:
            secret: returns the present secret; a new one invalidates all keys of the old one.
            given: a job key to use instead of the derived one.
            seats: names of the player slots, each of which has its own keys.
        """
        self._secret, self._job, self._given = secret, job, given
        self._seats = tuple(seats)
        self._derived = (b"", "")  # the last secret, and the job key made from it
        # A worker sends its key with every call, and signing takes longer than a look-up.
        self._episode_key = lru_cache(MOST_EPISODES)(self._sign_episode)
        self._seat_key = lru_cache(MOST_EPISODES)(self._sign_seat)

    @property
    def job_key(self) -> str:
        """Return the job's key: the given one, or one derived from the present secret."""
        return self._job_key(self._secret())

    def episode_key(self, episode_id: str, fence: int) -> str:
        """Return the key of an episode's lease: HMAC(secret, job, episode, fence), after episode and fence in clear."""
        return self._episode_key(self._secret(), episode_id, fence)

    def seat_key(self, seat: SeatKey) -> str:
        """Return the key of a player slot's lease, which opens only this slot of this episode."""
        return self._seat_key(self._secret(), seat)

    @property
    def viewer_key(self) -> str:
        """Return the key that only shows the job's page, derived from the present secret."""
        return self._viewer_key(self._secret())

    @property
    def talk_key(self) -> str:
        """Return the key for the page's unrecorded calls of policies, derived from the present secret."""
        return self._talk_key(self._secret())

    def _talk_key(self, secret: bytes) -> str:
        return f"pt-{sign(secret, self._job, 'talk')}"

    def _viewer_key(self, secret: bytes) -> str:
        return f"pv-{sign(secret, self._job, 'view')}"

    def _job_key(self, secret: bytes) -> str:
        if self._given is not None:
            return self._given
        if self._derived[0] != secret:
            self._derived = secret, job_key(secret, self._job)
        return self._derived[1]

    def _sign_episode(self, secret: bytes, episode_id: str, fence: int) -> str:
        return f"pe-{episode_id}.{fence}.{sign(secret, self._job, 'episode', episode_id, str(fence))}"

    def _sign_seat(self, secret: bytes, seat: SeatKey) -> str:
        place = self._seats.index(seat.role)  # the name of a seat may have characters that no header may have
        parts = (seat.episode_id, str(seat.fence), str(place), str(seat.seat_fence))
        return f"ps-{'.'.join(parts)}.{sign(secret, self._job, 'seat-lease', seat.role, *parts)}"

    def check(self, key: str | None) -> EpisodeKey | SeatKey | RoleKey | TalkKey | None:
        """Return what a key opens: an episode, a player slot, claims of a slot, or the chat playground; None: the job.

        Raises:
            Unauthorized: the key is missing or unknown.
            Forbidden: the key is the viewer's.
        """
        if not key:
            raise Unauthorized("no key; send the header `Authorization: Bearer <key>`")
        secret = self._secret()  # once: each look at it asks the file system
        if hmac.compare_digest(key.encode(), self._job_key(secret).encode()):
            return None
        # The beginning is looked at first, so that the check of an episode's key signs nothing else.
        if key.startswith("pv-") and hmac.compare_digest(key.encode(), self._viewer_key(secret).encode()):
            raise Forbidden("this is the viewer's key, which opens the job's page and nothing else")
        if key.startswith("pt-") and hmac.compare_digest(key.encode(), self._talk_key(secret).encode()):
            return TalkKey()
        prefix, _, _ = key.rpartition(".")
        episode_id, _, fence = prefix.removeprefix("pe-").rpartition(".")
        known = key.startswith("pe-") and fence.isascii() and fence.isdigit() and len(fence) < 10
        if known and hmac.compare_digest(key.encode(), self._episode_key(secret, episode_id, int(fence)).encode()):
            return EpisodeKey(episode_id, int(fence))
        if (seat := self._seat_of(secret, key)) is not None:
            return seat
        raise Unauthorized("unknown key; it may be of another job, or the run has other keys by now")

    def _seat_of(self, secret: bytes, key: str) -> SeatKey | RoleKey | None:
        """Return the player slot of a key, or the slot that it may claim, or None."""
        if key.startswith("pr-"):
            made = ((role, seat_key(secret, self._job, role)) for role in self._seats)
            return next(
                (RoleKey(role) for role, good in made if hmac.compare_digest(key.encode(), good.encode())), None
            )
        parts = key.removeprefix("ps-").rsplit(".", 4)
        numbers = [int(part) for part in parts[1:4] if part.isascii() and part.isdigit() and len(part) < 10]
        if not key.startswith("ps-") or len(parts) != 5 or len(numbers) != 3 or numbers[1] >= len(self._seats):
            return None
        seat = SeatKey(parts[0], numbers[0], self._seats[numbers[1]], numbers[2])
        return seat if hmac.compare_digest(key.encode(), self._seat_key(secret, seat).encode()) else None

    def admit(self, request: Request) -> None:
        """Check the key of a request before its body is read, and store the result for `require_episode`.

        Raises:
            Unauthorized: the key is missing or unknown.
            Forbidden: the key only allows model calls, and the route is another one.
        """
        opens = request.scope[_OPENS] = self.check(bearer(request))
        if isinstance(opens, TalkKey) and not request.scope["path"].startswith(MODEL_ROUTES):
            raise Forbidden(f"this key calls models ({MODEL_ROUTES}…) and opens nothing else")

    def require_view(self, request: Request) -> None:
        """Check that a request has the viewer's or the job's key.

        Raises:
            Unauthorized: the key is missing or unknown.
            Forbidden: the key is an episode's.
        """
        if not hmac.compare_digest((bearer(request) or "").encode(), self.viewer_key.encode()):
            self.require_job(request)

    def require_job(self, request: Request) -> None:
        """Check that a request has the job's key.

        Raises:
            Unauthorized: the key is missing or unknown.
            Forbidden: the key is an episode's.
        """
        if self.check(bearer(request)) is not None:
            raise Forbidden("this is the key of an episode, a seat or a talk; this route takes the job's key")

    def require_role(self, request: Request, role: str) -> bool:
        """Check that a request has the job's key or the key that claims this player slot; return True for the latter.

        Raises:
            Unauthorized: the key is missing or unknown.
            Forbidden: the key claims another slot, or is an episode's or slot's.
        """
        key = self.check(bearer(request))
        if isinstance(key, RoleKey):
            if key.role != role:
                raise Forbidden(f"this key claims the seat {key.role!r}, and not {role!r}")
        elif key is not None:
            raise Forbidden("this is an episode's key, or a seat's; a claim takes the job's key, or that of its seat")
        return isinstance(key, RoleKey)

    def require_seat(self, request: Request, episode_id: str) -> SeatKey:
        """Return the player slot of an episode for a request's key.

        Raises:
            Unauthorized: the key is missing or unknown.
            Forbidden: the key is not one of this episode's slots.
        """
        key = self.check(bearer(request))
        if not isinstance(key, SeatKey) or key.episode_id != episode_id:
            raise Forbidden(f"this key is not the key of a seat of episode {episode_id}; claim one with `role`")
        return key

    def opens_job(self, request: Request) -> bool:
        """Return whether a request has the job's present key."""
        return hmac.compare_digest((bearer(request) or "").encode(), self.job_key.encode())

    def require_episode(self, request: Request) -> EpisodeKey | SeatKey:
        """Return the episode, or its player slot, for a request's key.

        Raises:
            Unauthorized: the key is missing or unknown.
            Forbidden: the key is the job's, or only claims a slot.
        """
        key = request.scope[_OPENS] if _OPENS in request.scope else self.check(bearer(request))
        if key is None:
            raise Forbidden("this is the job's key; this route takes the key of the episode (claim one)")
        if isinstance(key, RoleKey):
            raise Forbidden("this key claims a seat; this route takes the key of the claimed seat")
        if isinstance(key, TalkKey):
            raise Forbidden("this key calls models outside any episode; this route takes the key of an episode")
        return key

    def episode_of(self, request: Request) -> EpisodeKey | SeatKey | None:
        """Return the episode, or its player slot, for a request's key; None: another key of the job."""
        key = request.scope[_OPENS] if _OPENS in request.scope else self.check(bearer(request))
        return key if isinstance(key, EpisodeKey | SeatKey) else None

    def opens_talk(self, request: Request) -> bool:
        """Return whether a request has the chat playground's key."""
        key = request.scope[_OPENS] if _OPENS in request.scope else self.check(bearer(request))
        return isinstance(key, TalkKey)

    async def require_this_episode(self, request: Request, episode_id: str, episodes: Episodes) -> EpisodeKey | SeatKey:
        """Check that a request has a key of one episode or of its player slot, and return what the key opens.

        Args:
            episodes: tell an unknown episode from a wrong key.

        Raises:
            Unauthorized: the key is missing or unknown.
            Forbidden: the key is not this episode's.
            NotFound: the episode does not exist.
        """
        key = self.check(bearer(request))
        if key is None or isinstance(key, RoleKey | TalkKey) or key.episode_id != episode_id:
            await episodes.get(episode_id)
            raise Forbidden(f"this key is not the key of episode {episode_id}")
        return key


class Caller(NamedTuple):
    """The maker of a model call.

    Attributes:
        open_session: opens the session of the call.
        seat: the player slot; None: any agent of the episode.
    """

    open_session: OpenSession
    seat: str | None = None


def caller_of(kind: JobKind, keys: KeyRing, sessions: Sessions, request: Request) -> Caller:
    """Check the key of a model call, and return its maker.

    Args:
        kind: a training job has a session for each episode, a served model one for each request.

    Raises:
        Unauthorized: the key is missing or unknown.
        Forbidden: the key is the job's and episodes are played, or an episode's and a model is served.
    """
    if keys.opens_talk(request):
        return Caller(sessions.stateless)
    if kind == "inference":
        keys.require_job(request)
        return Caller(sessions.stateless)
    key = keys.require_episode(request)
    if isinstance(key, SeatKey):
        return Caller(partial(_of_seat, sessions, key), key.role)
    return Caller(partial(_of_lease, sessions, key))


@asynccontextmanager
async def _of_seat(sessions: Sessions, key: SeatKey) -> AsyncIterator[SeatSession]:
    assert sessions.seats is not None, "a key of a seat was checked, so the job has seats"
    table = sessions.seats.table(key)
    table.renew(key.role, key.seat_fence)
    yield SeatSession(await sessions.open(key.episode_id, key.fence), table, key.role, key.seat_fence)


@asynccontextmanager
async def _of_lease(sessions: Sessions, key: EpisodeKey) -> AsyncIterator[EpisodeSession]:
    yield await sessions.open(key.episode_id, key.fence)


def refuse_episodes(kind: JobKind, keys: KeyRing, request: Request) -> None:
    """Raise an error for a request about episodes if the job has none.

    Raises:
        Conflict: the job serves a model.
        Unauthorized: the job serves a model, and the key is not this job's.
    """
    if kind == "inference":
        keys.check(bearer(request))
        raise Conflict(
            "this job serves a model and has no episodes; call /v1/chat/completions, or another dialect, with its key"
        )
