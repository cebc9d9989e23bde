"""Authentication of a data plane: its keys, and the sessions of model calls.

An episode's key is derived from the run's secret, not stored, so that a repeated claim gets the same key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from starlette.requests import Request

from palestra.config import JobKind
from palestra.errors import Forbidden, Unauthorized
from palestra.http.guard import bearer
from palestra.session import EpisodeKey, SeatKey
from palestra.store import Episodes
from palestra.store.key_files import job_key, seat_key, sign

MOST_EPISODES = 4096  # whose keys are kept
MODEL_ROUTES = "/v1/"  # beginning of the paths of all dialects
CALLER = "palestra.caller"  # key in the scope of a request, whose value is its `Caller`


@dataclass(frozen=True, slots=True)
class JobKey:
    """Everything of a job."""


@dataclass(frozen=True, slots=True)
class ViewerKey:
    """The job's page."""


@dataclass(frozen=True, slots=True)
class RoleKey:
    """The player slot that a key may claim; exists only after the key's signature was checked."""

    role: str


@dataclass(frozen=True, slots=True)
class PlaygroundKey:
    """Calls of the job's policies outside episodes, for the chat playground; exists only after the key was checked."""


# What the key of a request opens; made once, at the door, after its signature was checked.
Caller: TypeAlias = JobKey | ViewerKey | EpisodeKey | SeatKey | RoleKey | PlaygroundKey
_OF_JOB: tuple[Caller, ...] = (JobKey(), ViewerKey(), PlaygroundKey())


class KeyRing:
    """Creates and checks the keys of one job from its run's secret.

    Attributes:
        secret: returns the present secret; a new one invalidates all keys of the old one.
        opens: returns what a key opens under a secret; see `check`.
    """

    def __init__(
        self, secret: Callable[[], bytes], job: str, given: str | None = None, seats: Sequence[str] = ()
    ) -> None:
        """Create the key ring of a job.

        Args:
            secret: see the class.
            given: a job key to use instead of the derived one.
            seats: names of the player slots, each of which has its own keys.
        """
        self.secret, self._job, self._given = secret, job, given
        self._seats = tuple(seats)
        # A worker sends its key with every call, and signing takes longer than a look-up. Only good keys are kept.
        self.opens = lru_cache(MOST_EPISODES)(self._checked)
        self._of_job = lru_cache(1)(self._made)

    @property
    def job_key(self) -> str:
        """Return the job's key: the given one, or one derived from the present secret."""
        return self._of_job(self.secret())[0]

    @property
    def viewer_key(self) -> str:
        """Return the key that only shows the job's page, derived from the present secret."""
        return self._of_job(self.secret())[1]

    @property
    def playground_key(self) -> str:
        """Return the key for the page's unrecorded calls of policies, derived from the present secret."""
        return self._of_job(self.secret())[2]

    def episode_key(self, episode_id: str, fence: int, secret: bytes | None = None) -> str:
        """Return the key of an episode's lease: HMAC(secret, job, episode, fence), after episode and fence in clear."""
        signed = sign(secret or self.secret(), self._job, "episode", episode_id, str(fence))
        return f"pe-{episode_id}.{fence}.{signed}"

    def seat_key(self, seat: SeatKey, secret: bytes | None = None) -> str:
        """Return the key of a player slot's lease, which opens only this slot of this episode."""
        place = self._seats.index(seat.role)  # the name of a seat may have characters that no header may have
        parts = (seat.episode_id, str(seat.fence), str(place), str(seat.seat_fence))
        return f"ps-{'.'.join(parts)}.{sign(secret or self.secret(), self._job, 'seat-lease', seat.role, *parts)}"

    def _made(self, secret: bytes) -> tuple[str, str, str]:
        """Return the keys of the job, of its viewer and of the chat playground."""
        own = job_key(secret, self._job) if self._given is None else self._given
        return own, f"pv-{sign(secret, self._job, 'view')}", f"pt-{sign(secret, self._job, 'talk')}"

    def check(self, key: str | None) -> Caller:
        """Return what a key opens. Raises Unauthorized: there is no key, or it is not a key of this job."""
        return self.opens(self.secret(), key or "")

    def _checked(self, secret: bytes, key: str) -> Caller:
        """Return what a key opens under a secret."""
        if not key:
            raise Unauthorized("no key; send the header `Authorization: Bearer <key>`")
        for caller, good in zip(_OF_JOB, self._of_job(secret), strict=True):
            if hmac.compare_digest(key.encode(), good.encode()):
                return caller
        prefix, _, _ = key.rpartition(".")
        episode_id, _, fence = prefix.removeprefix("pe-").rpartition(".")
        known = key.startswith("pe-") and fence.isascii() and fence.isdigit() and len(fence) < 10
        if known and hmac.compare_digest(key.encode(), self.episode_key(episode_id, int(fence), secret).encode()):
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
        return seat if hmac.compare_digest(key.encode(), self.seat_key(seat, secret).encode()) else None

    def recheck(self, request: Request) -> None:
        """Check the key of an admitted request again, which may have waited: the job may have other keys by now. Raises
        Unauthorized: the key is not a key of this job any more.
        """
        self.check(bearer(request))


class Door:
    """Lets requests in before their bodies are read, by their keys."""

    def __init__(
        self, keys: KeyRing, kind: JobKind, models: Collection[str], most_bytes: int, page: str | None = None
    ) -> None:
        """Create the door of a data plane.

        Args:
            models: paths of model calls: by an episode's key in a training job, by the job's where it serves a model.
            most_bytes: of a body.
            page: beginning of the paths that the job's key and the viewer's open, if any.
        """
        self._keys, self._most_bytes, self._page = keys, most_bytes, page
        self._serves, self._models = kind == "inference", frozenset(models)
        self._callers = PlaygroundKey | JobKey if self._serves else PlaygroundKey | EpisodeKey | SeatKey

    async def admit(self, request: Request) -> int:
        """Check the key of a request, put its `Caller` into the scope, and return how many bytes its body may have.
        Raises Unauthorized: there is no key, or it is not a key of this job. Raises Forbidden: the key does not open
        this route.
        """
        caller, path = self._keys.opens(self._keys.secret(), bearer(request) or ""), request.scope["path"]
        if self._page is not None and path.startswith(self._page):
            if not isinstance(caller, JobKey | ViewerKey):
                raise Forbidden("this key does not open the page; it takes the job's key, or the viewer's")
        elif isinstance(caller, ViewerKey):
            raise Forbidden("this is the viewer's key, which opens the job's page and nothing else")
        elif isinstance(caller, PlaygroundKey) and not path.startswith(MODEL_ROUTES):
            raise Forbidden(f"this key calls models ({MODEL_ROUTES}…) and opens nothing else")
        elif path in self._models and not isinstance(caller, self._callers):
            if self._serves:
                raise Forbidden("this is the key of an episode, a seat or a talk; this route takes the job's key")
            if isinstance(caller, RoleKey):
                raise Forbidden("this key claims a seat; this route takes the key of the claimed seat")
            raise Forbidden("this is the job's key; this route takes the key of the episode (claim one)")
        request.scope[CALLER] = caller
        return self._most_bytes


def caller_of(request: Request) -> Caller:
    """Return who sends an admitted request."""
    caller: Caller = request.scope[CALLER]
    return caller


def require_job(request: Request) -> None:
    """Check that a request carries the job's key. Raises Forbidden: it is another one."""
    if not isinstance(caller_of(request), JobKey):
        raise Forbidden("this is the key of an episode, a seat or a talk; this route takes the job's key")


def require_role(request: Request, role: str) -> bool:
    """Check that a request carries the job's key, or the key that claims this player slot.

    Returns:
        Whether the key is the slot's instead of the job's.

    Raises:
        Forbidden: the key claims another slot, or is an episode's or a slot's.
    """
    match caller_of(request):
        case JobKey():
            return False
        case RoleKey(own):
            if own != role:
                raise Forbidden(f"this key claims the seat {own!r}, and not {role!r}")
            return True
        case _:
            raise Forbidden("this is an episode's key, or a seat's; a claim takes the job's key, or that of its seat")


def require_seat(request: Request, episode_id: str) -> SeatKey:
    """Return the player slot of an episode for a request's key. Raises Forbidden: the key is not one of this episode's
    slots.
    """
    caller = caller_of(request)
    if not isinstance(caller, SeatKey) or caller.episode_id != episode_id:
        raise Forbidden(f"this key is not the key of a seat of episode {episode_id}; claim one with `role`")
    return caller


async def require_episode(request: Request, episode_id: str, episodes: Episodes) -> EpisodeKey | SeatKey:
    """Check that a request carries a key of one episode or of its player slot, and return what the key opens.
    `episodes`: the job's episodes, to tell an unknown episode from a wrong key. Raises Forbidden: the key is not this
    episode's. Raises NotFound: there is no such episode.
    """
    caller = caller_of(request)
    if not isinstance(caller, EpisodeKey | SeatKey) or caller.episode_id != episode_id:
        await episodes.get(episode_id)
        raise Forbidden(f"this key is not the key of episode {episode_id}")
    return caller
