"""For whom a model call is made: for an episode, by its key; or, where a model is served, for whoever has the job's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from starlette.requests import Request

from palestra.errors import Conflict
from palestra.gateway.keys import EpisodeKey, bearer
from palestra.gateway.plane import DataPlane
from palestra.session import EpisodeSession, Session, Sessions

OpenSession = Callable[[], AbstractAsyncContextManager[Session]]  # for the time of one request


def caller_of(plane: DataPlane, request: Request) -> OpenSession:
    """Check the key of a model call; returns what opens its session.

    Raises:
        Unauthorized: no key, or an unknown one.
        Forbidden: the job's key where episodes are played, or an episode's where a model is served.
    """
    if plane.config.kind == "inference":
        plane.keys.require_job(request)
        return plane.sessions.stateless
    return partial(_of_lease, plane.sessions, plane.keys.require_episode(request))


async def refuse_episodes(plane: DataPlane, request: Request) -> None:
    """What every route for episodes asks first.

    Raises:
        Conflict: the job serves a model.
        Unauthorized: likewise, and the key is not of this job.
    """
    if plane.config.kind == "inference":
        plane.keys.check(bearer(request))
        raise Conflict(
            "this job serves a model and has no episodes; call /v1/chat/completions, or another dialect, with its key"
        )


@asynccontextmanager
async def _of_lease(sessions: Sessions, key: EpisodeKey) -> AsyncIterator[EpisodeSession]:
    yield await sessions.open(key.episode_id, key.fence)
